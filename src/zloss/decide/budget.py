"""The λ that meets a gradient budget: R_Z(λ) = ‖λ·g‖/‖g_CE‖ is linear in λ at a fixed checkpoint, so one value gives all."""

from __future__ import annotations

from zloss.results.audit import AuditReport
from zloss.results.decision import Effect, LambdaBudget


def solve_coefficient(coef: float, r_z: float | None, budget: float) -> float | None:
    """λ = coef · budget / R_Z(coef); None where R_Z is unknown or 0 (then no λ reaches the budget).

    >>> solve_coefficient(1e-4, 0.035, 0.07)
    0.0002
    """
    return None if not r_z else coef * budget / r_z


def lambda_budget(report: AuditReport, budget: float) -> LambdaBudget | None:
    """The λ of every measured scope; None without a gradient section."""
    gradient = report.gradient
    if gradient is None:
        return None
    return LambdaBudget(
        r_z=budget,
        raw=solve_coefficient(gradient.coef, gradient.raw.r_z, budget),
        centered=solve_coefficient(gradient.coef, gradient.centered.r_z, budget),
        whole_model=solve_coefficient(gradient.coef, gradient.whole_model.r_z, budget),
    )


def budget_effects(report: AuditReport, budget: float) -> tuple[Effect, ...]:
    """The diagnostic λ and the λ that meets the budget, in both coordinates."""
    solved = lambda_budget(report, budget)
    if solved is None or report.gradient is None:
        return ()
    coef = report.gradient.coef
    note = f"R_Z is linear in λ; gradient of the head on {report.gradient.blocks} blocks"
    found = [(name, value) for name, value in (("raw", solved.raw), ("centered", solved.centered)) if value is not None]
    return tuple(
        Effect(f"λ for R_Z = {budget:.3g}, {name}", coef, value, unit="λ", note=note if i == 0 else "")
        for i, (name, value) in enumerate(found)
    )
