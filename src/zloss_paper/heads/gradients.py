"""text:gradient_geometry (a figure and its caption) and text:tied_paths: the Z-loss gradient of output heads.

    zloss reproduce text:gradient_geometry text:tied_paths --profile paper

Expected: rank-16 correlations of GPT-2 0.997 raw and 0.977 centered; p99 A_p falls from 31.0 to 18.5. The figure is drawn from
the audit's token sample. Cost: 32 blocks of 256.

On tied tables R_Z is 3.5 % with a cosine to CE near 0 for GPT-2 and GPT-2 Medium, and output and input paths of comparable norm;
17.5 % and a negative cosine for Pythia-160M, whose untied projection has no input path. The paper states neither text,
batch nor λ here, so its norms can be compared in kind only. Cost: 8 blocks of 256, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zloss.report.audit_figures import geometry_figures
from zloss.report.figures import write_figures
from zloss.report.numbers import number
from zloss.results.audit import NO_INPUT_PATH, AuditReport, GeometrySample
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig, paper_target
from zloss_paper.engine.claims import (
    QUOTED_TOLERANCE,
    Claim,
    LineTest,
    Missing,
    Tested,
    all_lines,
    all_pairs,
    among,
    cell,
    line_test,
    near,
    of_models,
)
from zloss_paper.engine.inputs import WIKITEXT
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Cell, Key, Line, PaperTable, Table, cells_from, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.recipe import audit_summary, goes_from_to, head_lines, head_recipe

GEOMETRY_COLUMNS = ("rho_16", "a_p_99", "translation_error", "identity_error")
SAMPLE_TOLERANCE = 1e-4
"""Coordinates of the sample are kept to six digits."""
TRACKS = 0.9


def run_geometry(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
    """Two lines per model, and the figure."""
    audited = [(model, bench.audit(model.audit)) for model in config.rows]
    lines = []
    for model, report in audited:
        for line in head_lines(model, report, GEOMETRY_COLUMNS[:2]):
            errors = sample_errors(report.figures.geometry, str(line.key["head"]))
            lines.append(replace(line, cells={**line.cells, **cells_of(errors)}))

    def draw(folder: Path) -> Sequence[Path]:
        return [path for model, report in audited for path in _draw(folder, model.model, report)]

    summaries = [audit_summary(model, report) for model, report in audited]
    return RecipeResult(Table(tuple(lines)), texts=config.texts, details={"audits": summaries}, draw=draw)


def _draw(folder: Path, name: str, report: AuditReport) -> list[Path]:
    safe = "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)
    place = folder / f"gradient_geometry-{safe}"
    return write_figures(place, {"gradient_geometry": geometry_figures(report)}, formats=("svg",))


def sample_errors(sample: GeometrySample | None, head: str) -> dict[str, float | None]:
    """How far the sampled tokens deviate from the two identities of the figure: the largest relative error.

    Panel a: every shape moves by −w̄, so x by ‖w̄‖ and y not at all (one number for the pair, on its centered line).
    Panel c: ‖δ_u‖ = a·‖δ_z‖.
    """
    if sample is None:
        return {}
    gain2, delta_z, delta_u = (getattr(sample, f"{column}_{head}") for column in ("a2", "delta_z", "delta_u"))
    errors = [abs(u - math.sqrt(a2) * z) / u for a2, z, u in zip(gain2, delta_z, delta_u, strict=True) if u > 0]
    found = {"identity_error": max(errors, default=None)}
    if head == "centered" and sample.mean_row_norm:
        moves = zip(sample.x_raw, sample.x_centered, sample.y_raw, sample.y_centered, strict=True)
        length = sample.mean_row_norm
        # Six digits of a large coordinate are coarser than six digits of the move.
        errors = [max(abs(x - xc - length), abs(y - yc)) / max(length, abs(x), abs(y)) for x, xc, y, yc in moves]
        found["translation_error"] = max(errors, default=None)
    return found


def _one_vector(name: str, raw: Line, centered: Line) -> Tested:
    error = cell(centered, "translation_error")
    return error.value <= SAMPLE_TOLERANCE, f"{name}: largest relative error {number(error.value, 2)}"


def _correlations(name: str, first: Line, second: Line) -> Tested:
    raw, centered = cell(first, "rho_16"), cell(second, "rho_16")
    ok = near(raw, Cell(0.997, 0.0005), 0.01) and near(centered, Cell(0.977, 0.0005), 0.01)
    return ok, f"{name}: ρ_16 {number(raw.value)} raw, {number(centered.value)} centered"


def _caption() -> PaperTable:
    """The numbers of the caption, with the model that they describe."""
    printed = paper_table("text:gradient_geometry")
    lines = tuple(replace(line, key={"model": "GPT-2", **line.key}) for line in printed.table)
    return replace(printed, table=Table(lines))


GEOMETRY_CLAIMS = (
    Claim(
        "one_translation",
        "Centering moves the hidden-source shape of every token by the same vector, minus the mean row.",
        all_pairs(_one_vector),
        f"on the sampled tokens, within {SAMPLE_TOLERANCE:g} of their coordinates' size",
    ),
    Claim(
        "rank_16_tracks",
        "The rank-16 part closely tracks the exact a², raw and centered.",
        all_lines(line_test({"rho_16": "ρ_16"}, lambda found: found.value >= TRACKS)),
        f"closely: a correlation of {TRACKS:g} or more",
    ),
    Claim(
        "gain_identity",
        "Token by token ‖δ_u‖ = A_p·‖δ_z‖.",
        all_lines(
            line_test(
                {"identity_error": "largest relative error"},
                lambda error: error.value <= SAMPLE_TOLERANCE,
                {"identity_error": 2},
            )
        ),
        f"on the sampled tokens, within {SAMPLE_TOLERANCE:g}",
    ),
    Claim(
        "correlations_gpt2",
        "The correlations of GPT-2 are 0.997 raw and 0.977 centered.",
        of_models(("GPT-2",), all_pairs(_correlations), exact=True),
        "within 1 %",
    ),
    Claim(
        "gain_falls_gpt2",
        "Centering lowers p99 A_p of GPT-2 from 31.0 to 18.5.",
        of_models(("GPT-2",), all_pairs(goes_from_to("a_p_99", Cell(31.0, 0.05), Cell(18.5, 0.05))), exact=True),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
)


PATH_COLUMNS = {
    "r_z": "gradient.raw.r_z",
    "aux_ce_cosine": "gradient.raw.c_z",
    "output_path_norm": "tied_paths.raw.output_norm",
    "input_path_norm": "tied_paths.raw.input_norm",
    "input_output_cosine": "tied_paths.raw.cosine",
}
"""The columns, and where an audit has them."""
UNKNOWN = "the paper does not state the text, batch or λ behind these numbers"
ORTHOGONAL = 0.1
COUPLED = 0.05


def run_paths(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
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
    cells = cells_from(report, PATH_COLUMNS)
    why = NO_INPUT_PATH if not report.model.tied else report.reason("tied_paths") or "not measured"
    key: dict[str, Key] = {"model": model.model, "table": "tied" if report.model.tied else "untied"}
    reasons = {column: why for column in PATH_COLUMNS if column not in cells}
    return Line(key, cells, reasons, (*model.deviations, UNKNOWN), {"model": model.beside})


def _tied(line: Line) -> bool:
    return line.key.get("table") == "tied" or "output_path_norm" in line.cells


def _nearly_orthogonal(column: str, symbol: str) -> LineTest:
    return line_test({column: symbol}, lambda cosine: abs(cosine.value) <= ORTHOGONAL)


def _two_paths(line: Line) -> Tested:
    out, into = cell(line, "output_path_norm"), cell(line, "input_path_norm")
    share = min(out.value, into.value) / max(out.value, into.value)
    return share >= COUPLED, f"{line.name()}: output path {number(out.value)}, input path {number(into.value)}"


def _no_input_path(line: Line) -> Tested:
    found = "input_path_norm" in line.cells
    return not found, f"{'an input path' if found else 'none'}: {line.name()}"


def _larger_budget(table: Table) -> list[Tested]:
    untied, tied = table.find(model="Pythia-160M"), table.find(model="GPT-2") + table.find(model="GPT-2 Medium")
    if not untied or not tied:
        raise Missing("it compares Pythia-160M with GPT-2, and they were not both measured")
    largest = max(cell(line, "r_z").value for line in tied)
    budget, cosine = cell(untied[0], "r_z").value, cell(untied[0], "aux_ce_cosine").value
    evidence = f"R_Z {number(budget)} against {number(largest)}, cosine to CE {number(cosine)}"
    return [(budget > largest and cosine < 0, evidence)]


TO_CE = _nearly_orthogonal("aux_ce_cosine", "cosine to CE")
PATH_CLAIMS = (
    Claim(
        "nearly_orthogonal",
        "On the tied tables of GPT-2 and GPT-2 Medium the auxiliary gradient is nearly orthogonal to the CE gradient.",
        of_models(("GPT-2", "GPT-2 Medium"), all_lines(TO_CE)),
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
        of_models(("GPT-2",), all_lines(_nearly_orthogonal("input_output_cosine", "cosine of the paths"))),
        f"nearly: |cosine| ≤ {ORTHOGONAL:g}",
    ),
    Claim(
        "no_input_path",
        "An untied projection receives no gradient through an input path.",
        among(
            lambda line: not _tied(line), all_lines(_no_input_path), none="no model with an untied head was measured"
        ),
    ),
    Claim(
        "pythia_budget",
        "Pythia-160M has a much larger Z-loss gradient budget than the GPT-2 models, and a negative cosine to CE.",
        _larger_budget,
    ),
)


RECIPES = (
    head_recipe(
        "text:gradient_geometry",
        "Gradient geometry: rank-16 correlation, gain tail, and the figure's two identities",
        columns=GEOMETRY_COLUMNS,
        targets=[paper_target("GPT-2", WIKITEXT, 32, svd="randomized", batch_blocks=2, seed=67)],
        claims=GEOMETRY_CLAIMS,
        paper=_caption(),
        run=run_geometry,
    ),
    head_recipe(
        "text:tied_paths",
        "The Z-loss gradient on tied and untied tables: ratio, cosine, output and input path",
        columns=tuple(PATH_COLUMNS),
        targets=[
            paper_target(model, WIKITEXT, 8, gradient_blocks=8) for model in ("GPT-2", "GPT-2 Medium", "Pythia-160M")
        ],
        claims=PATH_CLAIMS,
        run=run_paths,
    ),
)
