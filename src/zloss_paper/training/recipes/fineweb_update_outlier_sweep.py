"""tab:fineweb_update_outlier_sweep: the update-outlier stress at smaller coefficients, and Centered Z-loss at all of them.

    zloss reproduce tab:fineweb_update_outlier_sweep --profile paper

Expected: no update events and PPL near CE at 1e-4, with A_p^99 25 for the raw-logit methods and 11.7 for Centered. Cost: thirty
runs of 2.5 M tokens on a model of 355 M parameters. The CE line is that of tab:fineweb_update_outlier, the same setting.
"""

from __future__ import annotations

from dataclasses import replace

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged, together
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import cell, smaller
from zloss_paper.engine.paper_methods import CE, CENTERED, GAIN_AWARE, RAW_METHODS, STANDARD
from zloss_paper.engine.paper_table import PaperTable, paper_table
from zloss_paper.engine.table import Line, Table
from zloss_paper.training.against_ce import COUNTS, NEAR_CE, against_ce, higher, line_of, lower, near_ce, zero
from zloss_paper.training.arms import BASELINE, Arm
from zloss_paper.training.each_run import all_finite
from zloss_paper.training.recipe import training_recipe
from zloss_paper.training.recipes.fineweb_update_outlier import EVENTS
from zloss_paper.training.recipes.fineweb_update_outlier import TABLE as OUTLIER

RAW_COEFS, CENTERED_COEFS = (3e-4, 1e-4), (3e-3, 1e-3, 3e-4, 1e-4)
LEAST = 1e-4
NEAR_PPL = 0.002
"""Relative difference of PPL that counts as near CE."""


def sweep_arm(method: str, coef: float) -> Arm:
    """A line of a sweep: its group, method and coefficient."""
    group = method if method in (CE, CENTERED) else "Raw-logit variants"
    return Arm(method, coef, (("group", group), ("method", method), ("lambda_aux", coef)))


def _with_ce() -> PaperTable:
    """The paper's lines, and before them the CE line of the same setting."""
    paper = paper_table("tab:fineweb_update_outlier_sweep", number_keys=("lambda_aux",))
    (ce,) = paper_table(OUTLIER.label).table.find(method=CE)
    first = Line(dict(sweep_arm(CE, 0.0).key), ce.cells)
    return replace(paper, table=Table((first, *paper.table.lines)))


TABLE = replace(
    OUTLIER,
    figure=False,
    label="tab:fineweb_update_outlier_sweep",
    columns=("ppl", "p_z_999", "a_p_99", "grad_norm_p99", *EVENTS, "grad_norm_max"),
    arms=(
        sweep_arm(CE, BASELINE.coef),
        *(sweep_arm(method, coef) for coef in RAW_COEFS for method in RAW_METHODS),
        *(sweep_arm(CENTERED, coef) for coef in CENTERED_COEFS),
    ),
)


def _events_fall(table: Table) -> list[Tested]:
    tested = []
    for method in RAW_METHODS:
        high, low = (line_of(table, method, lambda_aux=coef) for coef in RAW_COEFS)
        for name in (*EVENTS, "grad_norm_max"):
            a, b = cell(high, name), cell(low, name)
            tested.append((not smaller(a, b), f"{method}: {name} {number(a.value)} → {number(b.value)}"))
    return tested


CLAIMS = (
    Claim(
        "raw_events_fall_with_coefficient",
        "The update events of the raw-logit methods become fewer, and their largest norm smaller, as the coefficient falls.",
        judged(_events_fall),
    ),
    Claim(
        "raw_near_ce_at_least",
        "At 1e-4 Standard and Gain-aware Z-loss are near CE in PPL, without any update event.",
        together(
            against_ce((STANDARD, GAIN_AWARE), near_ce("ppl", NEAR_PPL), lambda_aux=LEAST),
            judged(
                lambda table: [
                    zero(*EVENTS)(line_of(table, method, lambda_aux=LEAST)) for method in (STANDARD, GAIN_AWARE)
                ]
            ),
        ),
        f"near: within {NEAR_PPL:.1%}",
    ),
    Claim(
        "raw_keep_gain",
        "At 1e-4 they lower the log-normalizer tail and leave the gain tail at the CE level.",
        against_ce((STANDARD, GAIN_AWARE), lower("p_z_999"), near_ce("a_p_99"), lambda_aux=LEAST),
        f"at the level: within {NEAR_CE:.0%}; {COUNTS}",
    ),
    Claim(
        "centered_no_events",
        "Centered Z-loss has no update event at any coefficient.",
        judged(lambda table: [zero(*EVENTS)(line_of(table, CENTERED, lambda_aux=coef)) for coef in CENTERED_COEFS]),
    ),
    Claim(
        "centered_ppl_cost",
        "At 3e-3 Centered Z-loss has a higher PPL than CE.",
        against_ce((CENTERED,), higher("ppl"), lambda_aux=3e-3),
    ),
    Claim(
        "centered_recovers",
        "At 1e-4 Centered Z-loss is near CE in PPL and still lowers both tails.",
        against_ce((CENTERED,), near_ce("ppl", NEAR_PPL), lower("p_z_999"), lower("a_p_99"), lambda_aux=LEAST),
        f"near: within {NEAR_PPL:.1%}; {COUNTS}",
    ),
    all_finite(
        "No micro-batch and no gradient of the stress runs was nonfinite.", "nonfinite_gradient", "nonfinite_microbatch"
    ),
)
RECIPE = training_recipe(TABLE, CLAIMS, paper=_with_ce())
