"""fig:gradient_geometry: the Z-loss gradient geometry of GPT-2 in three panels, and the four numbers of its caption.

    zloss reproduce text:gradient_geometry --profile paper

Expected: rank-16 correlations 0.997 raw and 0.977 centered; p99 A_p falls from 31.0 to 18.5. The figure is drawn from the
audit's token sample. Cost: 32 blocks of 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zloss.report.audit_figures import geometry_figures
from zloss.report.figures import write_figures
from zloss.report.numbers import number
from zloss.results.audit import AuditReport, GeometrySample
from zloss_paper.engine.audited_models import AuditTableConfig, paper_target
from zloss_paper.engine.claims import (
    QUOTED_TOLERANCE,
    Claim,
    Tested,
    all_lines,
    all_pairs,
    cell,
    for_models,
    line_test,
    near,
)
from zloss_paper.engine.inputs import WIKITEXT
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Cell, Pair, PaperTable, Table, cells_of, paper_table
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.claims import goes_from_to
from zloss_paper.heads.recipe import audit_summary, head_lines, head_recipe

LABEL = "text:gradient_geometry"
COLUMNS = ("rho_16", "a_p_99", "translation_error", "identity_error")
SAMPLE_TOLERANCE = 1e-4
"""Coordinates of the sample are kept to six digits."""
TRACKS = 0.9


def run(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
    """Two lines per model, and the figure."""
    audited = [(model, bench.audit(model.audit)) for model in config.rows]
    lines = []
    for model, report in audited:
        for line in head_lines(model, report, COLUMNS[:2]):
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
    """How far the sampled tokens are from the two identities of the figure, largest relative error.

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


def _one_vector(pair: Pair) -> Tested:
    error = cell(pair.centered, "translation_error")
    return error.value <= SAMPLE_TOLERANCE, f"{pair.name}: largest relative error {number(error.value, 2)}"


def _correlations(pair: Pair) -> Tested:
    raw, centered = cell(pair.raw, "rho_16"), cell(pair.centered, "rho_16")
    ok = near(raw, Cell(0.997, 0.0005), 0.01) and near(centered, Cell(0.977, 0.0005), 0.01)
    return ok, f"{pair.name}: ρ_16 {number(raw.value)} raw, {number(centered.value)} centered"


def _paper() -> PaperTable:
    """The caption's numbers, under the model it is about."""
    printed = paper_table(LABEL)
    lines = tuple(replace(line, key={"model": "GPT-2", **line.key}) for line in printed.table)
    return replace(printed, table=Table(lines))


CLAIMS = (
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
        for_models(("GPT-2",), _correlations, exact=True),
        "within 1 %",
    ),
    Claim(
        "gain_falls_gpt2",
        "Centering lowers p99 A_p of GPT-2 from 31.0 to 18.5.",
        for_models(("GPT-2",), goes_from_to("a_p_99", Cell(31.0, 0.05), Cell(18.5, 0.05)), exact=True),
        f"within {QUOTED_TOLERANCE:.0%}",
    ),
)

RECIPES = (
    head_recipe(
        LABEL,
        "Gradient geometry: rank-16 correlation, gain tail, and the figure's two identities",
        columns=COLUMNS,
        targets=[paper_target("GPT-2", WIKITEXT, 32, svd="randomized", batch_blocks=2, seed=67)],
        claims=CLAIMS,
        paper=_paper(),
        run=run,
    ),
)
