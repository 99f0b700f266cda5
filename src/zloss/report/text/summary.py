"""The main numbers of an audit in a few sentences."""

from __future__ import annotations

import math

from zloss.decide.budget import usual_range
from zloss.report.text.numbers import coefficient, factor, number, percent
from zloss.results.audit import AuditReport
from zloss.results.quantities import symbol

MOVES_LITTLE = 0.02
"""Ratios within this of 1 are called unchanged."""


def summarize(report: AuditReport) -> list[str]:
    """Sentences on the common shift, on what centering changes, on the λ that meets the R_Z budget, and the notes."""
    sentences = (_partial(report), _shift(report), _centering(report), _budget(report), *report.notes)
    return [sentence for sentence in sentences if sentence]


def _partial(report: AuditReport) -> str:
    if report.status == "complete":
        return ""
    done = report.finished_blocks or 0
    return f"This audit was interrupted: it covers {done} of {report.corpus.blocks} blocks."


def _shift(report: AuditReport) -> str:
    fired = {decision.stage: decision for decision in report.decisions}.get("Source coordinate")
    if fired is None or fired.value is None:
        return ""
    state = "large" if fired.fired else "small"
    limit = f"against a threshold of {number(fired.threshold)}"
    return f"The common shift is {state}: {symbol('mu_abs_99')} is {number(fired.value)} nats {limit}."


def _centering(report: AuditReport) -> str:
    raw, centered = report.heads.raw, report.heads.centered
    pairs = (
        (symbol("p_z_999"), raw.p_z_999, centered.p_z_999),
        (symbol("a_p_99"), raw.a_p_99, centered.a_p_99),
        (symbol("delta_u_99"), raw.delta_u_99, centered.delta_u_99),
    )
    verbs: dict[str, list[str]] = {"lowers": [], "raises": [], "keeps": []}
    for name, before, after in pairs:
        if before is None or after is None or before == 0:
            continue
        ratio = after / before
        verb = "keeps" if abs(ratio - 1) <= MOVES_LITTLE else "lowers" if ratio < 1 else "raises"
        verbs[verb].append(f"{name} from {number(before)} to {number(after)} ({factor(ratio)})")
    parts = [f"{verb} {_listed(items)}" for verb, items in verbs.items() if items]
    if not parts:
        return ""
    return f"Centering leaves PPL at {number(report.ppl)}; on this text it {', and it '.join(parts)}."


def _listed(items: list[str]) -> str:
    """The items with commas, and "and" before the last."""
    return " and ".join(part for part in (", ".join(items[:-1]), items[-1]) if part)


def _budget(report: AuditReport) -> str:
    budget, gradient = report.lambda_budget, report.gradient
    if budget is None or gradient is None or gradient.raw.r_z is None or budget.raw is None or not budget.raw > 0:
        return ""
    sentence = f"At λ = {coefficient(gradient.coef)} the Z gradient of the head is {percent(gradient.raw.r_z)} of the CE gradient"
    sentence += f"; it would be {percent(budget.r_z)}, the budget of R_Z, at λ = {coefficient(budget.raw)} raw"
    if budget.centered is not None:
        sentence += f", {coefficient(budget.centered)} centered"
    farthest = max(
        (value for value in (budget.raw, budget.centered) if value is not None and value > 0),
        key=lambda value: abs(math.log(value / 1e-4)),
    )
    return f"{sentence} ({usual_range(farthest)})."
