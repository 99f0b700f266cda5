"""Arms from the stages of an audit that fired, the most telling first.

| fired stage | arm | λ on the R_Z budget of |
|---|---|---|
| Source coordinate | Centered; Centered head without a run of its own | centered logits |
| Objective decomposition | Factorized | raw logits |
| Architectural transport | Standard, which is its reference, and Gain-aware | raw logits |
| Shared pathway | Standard | raw logits |
| none of them | Standard, the usual recipe, to compare with | raw logits |

Behind them stands each Z method once more at a tenth of its λ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zloss.decide import stages
from zloss.decide.budget import USUAL
from zloss.results.audit import AuditReport
from zloss.results.recommend_plan import Arm

DEFAULT_COEF = 1e-4
"""λ where R_Z was not measured: that of the paper's quality-neutral runs."""
SMALLER = 0.1
STANDARD, GAIN_AWARE, CENTERED_HEAD, CE = "standard", "gain-aware", "centered-head", "ce"


def candidates(report: AuditReport) -> tuple[Arm, ...]:
    """Every arm worth a run, without CE, in the order in which the budget is given to them; `report` has its decisions."""
    fired = [decision.stage for decision in report.decisions if decision.fired]
    budget = report.lambda_budget
    limit = math.nan if budget is None else budget.r_z
    raw = budget_coef(None if budget is None else budget.raw, limit)
    centered = budget_coef(None if budget is None else budget.centered, limit)
    wanted: list[tuple[str, tuple[float, str], tuple[stages.Stage, ...]]] = [
        ("centered", centered, (stages.SOURCE,)),
        ("factorized", raw, (stages.DECOMPOSITION,)),
        (STANDARD, raw, (stages.TRANSPORT, stages.PATHWAY)),
        (GAIN_AWARE, raw, (stages.TRANSPORT,)),
    ]
    arms = []
    for method, (coef, note), proposed_by in wanted:
        names = tuple(stage.name for stage in proposed_by if stage.name in fired)
        if names:
            arms.append(Arm(method, coef, names, note))
    if not arms:
        arms.append(Arm(STANDARD, raw[0], (), f"no stage fired; the usual recipe to compare with, {raw[1]}"))
    smaller = [
        replace(arm, coef=one_digit(SMALLER * arm.coef), note=f"a tenth of the λ of {arm.label}")
        for arm in arms
        if arm.method != GAIN_AWARE
    ]
    return (*arms, *smaller)


def budget_coef(solved: float | None, r_z: float) -> tuple[float, str]:
    """(λ, how it was chosen): the λ on the R_Z budget with one digit, rounded down, and at most 1e-3."""
    if solved is None:
        return DEFAULT_COEF, "R_Z was not measured, so λ is that of the paper's quality-neutral runs"
    coef = one_digit(min(solved, USUAL[1]))
    if solved > USUAL[1]:
        return coef, f"R_Z = {r_z:g} would allow {solved:.2g}; the usual range of λ ends at {USUAL[1]:g}"
    below = f", below the usual range from {USUAL[0]:g}" if coef < USUAL[0] else ""
    return coef, f"λ of R_Z = {r_z:g} at the start{below}"


def one_digit(value: float) -> float:
    """`value` rounded down to one significant digit.

    >>> one_digit(0.00097), one_digit(1e-3)
    (0.0009, 0.001)
    """
    exponent = math.floor(math.log10(value) + 1e-9)
    digit = math.floor(value / 10**exponent + 1e-9)
    return float(f"{digit}e{exponent}")


def with_references(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """The arms with Standard in front of every Gain-aware arm whose λ has none: it is judged against Standard."""
    found: list[Arm] = []
    for arm in arms:
        if arm.method == GAIN_AWARE and (STANDARD, arm.coef) not in {one.key for one in found}:
            found.append(Arm(STANDARD, arm.coef, (), "reference of gain-aware"))
        found.append(arm)
    return tuple(found)
