"""Joined results on the terminal."""

from __future__ import annotations

from zloss.decide.decided_results import DecidedResults, audit_names
from zloss.report.terminal.audit import print_audit, print_decisions, print_side_by_side
from zloss.report.terminal.comparison import print_comparison
from zloss.report.terminal.drift import print_drift
from zloss.report.terminal.implementation_audit import print_implementation_audit
from zloss.report.terminal.loss_audit import print_loss_audit
from zloss.report.terminal.recommendation import print_recommendation
from zloss.report.terminal.reproduction import print_reproduction
from zloss.report.terminal.router import print_measured_scale
from zloss.report.terminal.router_scale import print_router_scale


def print_results(results: DecidedResults) -> None:
    """Audits of losses and implementations and comparisons, each with its answer; one audit in full, several side by side,
    or the shared decision map; then recommendations, drifts, router scales and reproductions."""
    audits = results.audits
    for loss in results.loss_audits:
        print_loss_audit(loss)
    for judged in results.comparisons:
        print_comparison(judged.comparison)
    for audit in results.implementation_audits:
        print_implementation_audit(audit)
    if len(audits) == 1:
        print_audit(audits[0], models=results.maps[0].models)
    elif audits:
        print_side_by_side(
            list(zip(audit_names(audits), audits, strict=True)), models=[one.models for one in results.maps]
        )
    else:
        for decision_map in results.maps:
            print_decisions(decision_map.decisions, models=decision_map.models)
    for found in results.recommendations:
        print_recommendation(found)
    for drift in results.drifts:
        print_drift(drift)
    for scale in results.measured_routers:
        print_measured_scale(scale)
    for table in results.router_scales:
        print_router_scale(table, bold=(table.source,))
    for record in results.reproductions:
        print_reproduction(record)
