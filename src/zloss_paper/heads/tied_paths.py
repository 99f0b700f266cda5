"""text:tied_paths: what the raw Z-loss gradient does to a tied embedding table, and to an untied projection.

    zloss reproduce text:tied_paths --profile paper

Expected: R_Z 3.5 % and a cosine to CE near 0 for GPT-2 and GPT-2 Medium, with output and input paths of comparable norm;
17.5 % and a negative cosine for Pythia-160M, whose untied projection has no input path. The paper states neither text,
batch nor λ here, so its norms can be compared in kind only. Cost: 8 blocks of 256, forward and backward.
"""

from __future__ import annotations

from zloss.report.numbers import number
from zloss.results.audit import NO_INPUT_PATH, AuditReport
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig, paper_target
from zloss_paper.engine.claims import (
    FAILS,
    HOLDS,
    OPEN,
    Check,
    Claim,
    Judgement,
    LineTest,
    Tested,
    all_lines,
    among,
    cell,
    line_test,
)
from zloss_paper.engine.inputs import WIKITEXT
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_from
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.recipe import audit_summary, head_recipe

COLUMNS = {
    "r_z": "gradient.raw.r_z",
    "aux_ce_cosine": "gradient.raw.c_z",
    "output_path_norm": "tied_paths.raw.output_norm",
    "input_path_norm": "tied_paths.raw.input_norm",
    "input_output_cosine": "tied_paths.raw.cosine",
}
"""The columns, and where an audit has them."""
UNKNOWN = "the paper states neither text, batch nor λ of these numbers"
ORTHOGONAL = 0.1
COUPLED = 0.05


def run(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
    """One line per model, in raw coordinates."""
    lines, audits = [], []
    for model in config.rows:
        report = bench.audit(model.audit)
        lines.append(path_line(model, report))
        gradient = report.gradient
        counts = {} if gradient is None else {"coef": gradient.coef, "gradient_blocks": gradient.blocks}
        audits.append({**audit_summary(model, report), **counts})
    return RecipeResult(Table(tuple(lines)), texts=config.texts, details={"audits": audits})


def path_line(model: AuditedModel, report: AuditReport) -> Line:
    """R_Z, C_Z and the two paths; an untied head has none of the latter."""
    cells = cells_from(report, COLUMNS)
    why = NO_INPUT_PATH if not report.model.tied else report.reason("tied_paths") or "not measured"
    key: dict[str, Key] = {"model": model.model, "table": "tied" if report.model.tied else "untied"}
    reasons = {column: why for column in COLUMNS if column not in cells}
    return Line(key, cells, reasons, (*model.deviations, UNKNOWN), {"model": model.beside})


def _tied(line: Line) -> bool:
    return line.key.get("table") == "tied" or "output_path_norm" in line.cells


def _nearly_orthogonal(column: str, symbol: str) -> LineTest:
    return line_test({column: symbol}, lambda cosine: abs(cosine.value) <= ORTHOGONAL)


def _two_paths(line: Line) -> Tested:
    out, into = cell(line, "output_path_norm"), cell(line, "input_path_norm")
    share = min(out.value, into.value) / max(out.value, into.value)
    return share >= COUPLED, f"{line.name()}: output path {number(out.value)}, input path {number(into.value)}"


def _said_of(models: tuple[str, ...], test: LineTest) -> Check:
    """A check of named models alone; open where one of them was not measured."""

    def check(table: Table) -> Judgement:
        absent = [model for model in models if not table.find(model=model)]
        if absent:
            return Judgement(OPEN, f"not measured: {', '.join(absent)}")
        return among(lambda line: line.key["model"] in models, all_lines(test))(table)

    return check


def _no_input_path(table: Table) -> Judgement:
    untied = [line for line in table if not _tied(line)]
    if not untied:
        return Judgement(OPEN, "no model with an untied head was measured")
    with_path = [line.name() for line in untied if "input_path_norm" in line.cells]
    if with_path:
        return Judgement(FAILS, f"an input path: {', '.join(with_path)}")
    return Judgement(HOLDS, f"none: {', '.join(line.name() for line in untied)}")


def _larger_budget(table: Table) -> Judgement:
    untied, tied = table.find(model="Pythia-160M"), table.find(model="GPT-2") + table.find(model="GPT-2 Medium")
    if not untied or not tied:
        return Judgement(OPEN, "it compares Pythia-160M with GPT-2, and they were not both measured")
    largest = max(cell(line, "r_z").value for line in tied)
    budget, cosine = cell(untied[0], "r_z").value, cell(untied[0], "aux_ce_cosine").value
    evidence = f"R_Z {number(budget)} against {number(largest)}, cosine to CE {number(cosine)}"
    return Judgement(HOLDS if budget > largest and cosine < 0 else FAILS, evidence)


TO_CE = _nearly_orthogonal("aux_ce_cosine", "cosine to CE")
CLAIMS = (
    Claim(
        "nearly_orthogonal",
        "On the tied tables of GPT-2 and GPT-2 Medium the auxiliary gradient is nearly orthogonal to the CE gradient.",
        _said_of(("GPT-2", "GPT-2 Medium"), TO_CE),
        f"nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim(
        "pattern_nearly_orthogonal",
        "On every tied table the auxiliary gradient is nearly orthogonal to the CE gradient.",
        among(_tied, all_lines(TO_CE)),
        f"the paper says so of GPT-2 and GPT-2 Medium alone; nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim(
        "two_paths",
        "On a tied table the auxiliary loss acts through two paths, output and input, neither of them negligible.",
        among(_tied, all_lines(_two_paths)),
        f"not negligible: the smaller norm is at least {COUPLED:.0%} of the larger",
    ),
    Claim(
        "paths_nearly_orthogonal",
        "The two paths of GPT-2 are nearly orthogonal to each other.",
        _said_of(("GPT-2",), _nearly_orthogonal("input_output_cosine", "cosine of the paths")),
        f"nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim("no_input_path", "An untied projection receives no gradient through an input path.", _no_input_path),
    Claim(
        "pythia_budget",
        "Pythia-160M has a much larger Z-loss gradient budget than the GPT-2 models, and a negative cosine to CE.",
        _larger_budget,
    ),
)

RECIPES = (
    head_recipe(
        "text:tied_paths",
        "The Z-loss gradient on tied and untied tables: ratio, cosine, output and input path",
        columns=tuple(COLUMNS),
        targets=[
            paper_target(model, WIKITEXT, 8, gradient_blocks=8) for model in ("GPT-2", "GPT-2 Medium", "Pythia-160M")
        ],
        claims=CLAIMS,
        run=run,
    ),
)
