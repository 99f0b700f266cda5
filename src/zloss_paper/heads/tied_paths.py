"""text:tied_paths: what the raw Z-loss gradient does to a tied embedding table, and to an untied projection.

    zloss reproduce text:tied_paths --profile paper

Expected: R_Z 3.5 % and a cosine to CE near 0 for GPT-2 and GPT-2 Medium, with output and input paths of comparable norm;
17.5 % and a negative cosine for Pythia-160M, whose untied projection has no input path. The paper states neither text,
batch nor λ here, so its norms can be compared in kind only. Cost: 8 blocks of 256, forward and backward.
"""

from __future__ import annotations

from zloss.report.text.numbers import number
from zloss.results.audit import AuditReport
from zloss.results.gradient_numbers import NO_INPUT_PATH, GradientNumbers, PathNumbers
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig, paper_target
from zloss_paper.engine.checks import LineTest, Tested, all_lines
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Check, Claim, Judgement
from zloss_paper.engine.comparison import cell
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.lines import audit_summary
from zloss_paper.heads.recipe import head_recipe

LABEL = "text:tied_paths"
COLUMNS = ("r_z", "aux_ce_cosine", "output_path_norm", "input_path_norm", "input_output_cosine")
TARGETS = tuple(
    paper_target(model, WIKITEXT, 8, gradient_blocks=8) for model in ("GPT-2", "GPT-2 Medium", "Pythia-160M")
)
CHOICES = {
    "model_ids": "the checkpoints gpt2 and gpt2-medium on the hub",
    "corpus": "WikiText-103 validation, raw variant",
    "diagnostic_batch_size": "the first 8 blocks, gradients mean-reduced over their predictions",
    "block_size": "256",
    "lambda_value": "1e-4, the diagnostic coefficient; R_Z and both norms are linear in it, the cosines do not depend on it",
    "precision": "fp32",
    "seed_values": "0; nothing here is random",
}
UNKNOWN = "the paper states neither text, batch nor λ of these numbers"
ORTHOGONAL = 0.1
COUPLED = 0.05


def run(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
    """One line per model, in raw coordinates."""
    lines, audits = [], []
    for model in config.rows:
        report = bench.audit(model.audit)
        lines.append(path_line(model, report))
        audits.append({**audit_summary(model, report), **_gradient(report)})
    return RecipeResult(Table(tuple(lines)), texts=config.texts, details={"audits": audits})


def path_line(model: AuditedModel, report: AuditReport) -> Line:
    """R_Z, C_Z and the two paths; an untied head has none of the latter."""
    gradient = GradientNumbers() if report.gradient is None else report.gradient.raw
    paths = PathNumbers() if report.tied_paths is None else report.tied_paths.raw
    values = {
        "r_z": gradient.r_z,
        "aux_ce_cosine": gradient.c_z,
        "output_path_norm": paths.output_norm,
        "input_path_norm": paths.input_norm,
        "input_output_cosine": paths.cosine,
    }
    why = NO_INPUT_PATH if not report.model.tied else report.reason("tied_paths") or "not measured"
    reasons = {column: why for column, value in values.items() if value is None}
    key: dict[str, Key] = {"model": model.model, "table": "tied" if report.model.tied else "untied"}
    beside: dict[str, Key] = {"model": model.beside}
    return Line(key, cells_of(values), reasons, (*model.deviations, UNKNOWN), beside)


def _gradient(report: AuditReport) -> dict[str, object]:
    gradient = report.gradient
    return {} if gradient is None else {"coef": gradient.coef, "gradient_blocks": gradient.blocks}


def _tied(line: Line) -> bool:
    return line.key.get("table") == "tied" or "output_path_norm" in line.cells


def _about(table: Table, *, tied: bool) -> Table:
    return Table(tuple(line for line in table if _tied(line) == tied))


def _orthogonal(line: Line) -> Tested:
    found = cell(line, "aux_ce_cosine")
    return abs(found.value) <= ORTHOGONAL, f"{line.name()}: cosine to CE {number(found.value)}"


def _two_paths(line: Line) -> Tested:
    out, into = cell(line, "output_path_norm"), cell(line, "input_path_norm")
    share = min(out.value, into.value) / max(out.value, into.value)
    return share >= COUPLED, f"{line.name()}: output path {number(out.value)}, input path {number(into.value)}"


def _paths_orthogonal(line: Line) -> Tested:
    found = cell(line, "input_output_cosine")
    return abs(found.value) <= ORTHOGONAL, f"{line.name()}: cosine of the paths {number(found.value)}"


def _said_of(models: tuple[str, ...], test: LineTest) -> Check:
    """A check of named models alone; open where one of them was not measured."""

    def check(table: Table) -> Judgement:
        absent = [model for model in models if not table.find(model=model)]
        if absent:
            return Judgement(OPEN, f"not measured: {', '.join(absent)}")
        return all_lines(test)(Table(tuple(line for line in table if line.key["model"] in models)))

    return check


def _no_input_path(table: Table) -> Judgement:
    untied = _about(table, tied=False)
    if not untied.lines:
        return Judgement(OPEN, "no model with an untied head was measured")
    with_path = [line.name() for line in untied if "input_path_norm" in line.cells]
    names = ", ".join(line.name() for line in untied)
    return (
        Judgement(FAILS, f"an input path: {', '.join(with_path)}") if with_path else Judgement(HOLDS, f"none: {names}")
    )


def _larger_budget(table: Table) -> Judgement:
    untied, tied = table.find(model="Pythia-160M"), table.find(model="GPT-2") + table.find(model="GPT-2 Medium")
    if not untied or not tied:
        return Judgement(OPEN, "it compares Pythia-160M with GPT-2, and they were not both measured")
    largest = max(cell(line, "r_z").value for line in tied)
    budget, cosine = cell(untied[0], "r_z").value, cell(untied[0], "aux_ce_cosine").value
    evidence = f"R_Z {number(budget)} against {number(largest)}, cosine to CE {number(cosine)}"
    return Judgement(HOLDS if budget > largest and cosine < 0 else FAILS, evidence)


CLAIMS = (
    Claim(
        "nearly_orthogonal",
        "On the tied tables of GPT-2 and GPT-2 Medium the auxiliary gradient is nearly orthogonal to the CE gradient.",
        _said_of(("GPT-2", "GPT-2 Medium"), _orthogonal),
        f"nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim(
        "pattern_nearly_orthogonal",
        "On every tied table the auxiliary gradient is nearly orthogonal to the CE gradient.",
        lambda table: all_lines(_orthogonal)(_about(table, tied=True)),
        f"the paper says so of GPT-2 and GPT-2 Medium alone; nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim(
        "two_paths",
        "On a tied table the auxiliary loss acts through two paths, output and input, neither of them negligible.",
        lambda table: all_lines(_two_paths)(_about(table, tied=True)),
        f"not negligible: the smaller norm is at least {COUPLED:.0%} of the larger",
    ),
    Claim(
        "paths_nearly_orthogonal",
        "The two paths of GPT-2 are nearly orthogonal to each other.",
        _said_of(("GPT-2",), _paths_orthogonal),
        f"nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim("no_input_path", "An untied projection receives no gradient through an input path.", _no_input_path),
    Claim(
        "pythia_budget",
        "Pythia-160M has a much larger Z-loss gradient budget than the GPT-2 models, and a negative cosine to CE.",
        _larger_budget,
    ),
)

RECIPE = head_recipe(
    LABEL,
    "The Z-loss gradient on tied and untied tables: ratio, cosine, output and input path",
    columns=COLUMNS,
    targets=TARGETS,
    claims=CLAIMS,
    choices=CHOICES,
    run=run,
)
