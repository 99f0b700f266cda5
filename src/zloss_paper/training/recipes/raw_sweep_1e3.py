"""text:raw_sweep_1e3: the raw-logit methods of the update-outlier stress at 1e-3, between the coefficients that are printed.

    zloss reproduce text:raw_sweep_1e3 --profile paper

The configuration section says that the raw-logit sweep covers 1e-3 and a CE baseline; the tables print 3e-3, 3e-4 and 1e-4.
All of them stand here side by side. Cost: nine runs of 2.5 M tokens on a model of 355 M parameters beyond those tables.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import Missing, cell, smaller
from zloss_paper.engine.paper_methods import CE, RAW_METHODS
from zloss_paper.engine.paper_table import PaperTable, paper_table
from zloss_paper.engine.table import Cell, Key, Line, Table
from zloss_paper.training.against_ce import SYMBOLS
from zloss_paper.training.arms import Arm
from zloss_paper.training.each_run import all_finite
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.recipes.fineweb_update_outlier import COEF, EVENTS
from zloss_paper.training.recipes.fineweb_update_outlier import TABLE as OUTLIER
from zloss_paper.training.recipes.fineweb_update_outlier_sweep import sweep_arm

COEFS = (COEF, 1e-3, 3e-4, 1e-4)


def _arm(method: str, coef: float) -> Arm:
    return Arm(method, coef, (("method", method), ("lambda_aux", coef)))


def _printed() -> PaperTable:
    """What the two tables print of this sweep: CE and 3e-3 in one, 3e-4 and 1e-4 in the other."""
    outlier = paper_table(OUTLIER.label)
    sweep = paper_table("tab:fineweb_update_outlier_sweep", number_keys=("lambda_aux",))
    lines = [
        Line({**line.key, "lambda_aux": 0.0 if line.key["method"] == CE else COEF}, line.cells)
        for line in outlier.table
        if line.key["method"] in (CE, *RAW_METHODS)
    ]
    group = dict(sweep_arm(RAW_METHODS[0], COEF).key)["group"]
    for line in sweep.table.find(group=group):
        key: dict[str, Key] = {name: line.key[name] for name in ("method", "lambda_aux")}
        lines.append(Line(key, line.cells))
    return replace(outlier, label="text:raw_sweep_1e3", table=Table(tuple(lines)))


TABLE = replace(
    OUTLIER,
    figure=False,
    label="text:raw_sweep_1e3",
    arms=(_arm(CE, 0.0), *(_arm(method, coef) for method in RAW_METHODS for coef in COEFS)),
)


def _by_method(table: Table, column: str) -> list[tuple[str, list[Cell]]]:
    """The column of every raw-logit method, from the largest coefficient to the smallest."""
    found = []
    for method in RAW_METHODS:
        lines = sorted(table.find(method=method), key=lambda line: -float(line.key["lambda_aux"]))
        if len(lines) < 2:
            raise Missing(f"{method} was not measured at two coefficients")
        found.append((method, [cell(line, column) for line in lines]))
    return found


def _events_fall(table: Table) -> list[Tested]:
    return [
        (not any(smaller(high, low) for high, low in pairwise(cells)), _sentence(method, column, cells))
        for column in (*EVENTS, "grad_norm_max")
        for method, cells in _by_method(table, column)
    ]


def _tail_rises(table: Table) -> list[Tested]:
    return [
        (all(smaller(high, low) for high, low in pairwise(cells)), _sentence(method, "p_z_999", cells))
        for method, cells in _by_method(table, "p_z_999")
    ]


def _sentence(method: str, column: str, cells: list[Cell]) -> str:
    return f"{method}: {SYMBOLS.get(column, column)} {' → '.join(number(one.value) for one in cells)}"


CLAIMS = (
    Claim(
        "events_fall_with_coefficient",
        "The update-event rates and the largest gradient norm of every raw-logit method fall with the coefficient.",
        judged(_events_fall),
    ),
    Claim(
        "tail_rises_as_coefficient_falls",
        "A smaller coefficient leaves a larger log-normalizer tail.",
        judged(_tail_rises),
    ),
    all_finite(
        "No micro-batch and no gradient of the stress runs was nonfinite.", "nonfinite_gradient", "nonfinite_microbatch"
    ),
)
RECIPE = training_recipe(
    TABLE,
    CLAIMS,
    title="The raw-logit update-outlier sweep with 1e-3 and its CE baseline (described, not printed)",
    paper=_printed(),
)
