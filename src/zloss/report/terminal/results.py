"""Joined results on the terminal."""

from __future__ import annotations

from zloss.decide.decided_results import DecidedResults, audit_names
from zloss.report.terminal.audit import print_audit, print_decisions, print_side_by_side
from zloss.report.terminal.drift import print_drift


def print_results(results: DecidedResults) -> None:
    """One audit in full, several side by side, or the decision map alone; then every drift."""
    audits = results.audits
    if len(audits) == 1:
        print_audit(audits[0])
    elif audits:
        print_side_by_side(list(zip(audit_names(audits), audits, strict=True)))
    else:
        for decision_map in results.maps:
            print_decisions(decision_map.decisions)
    for drift in results.drifts:
        print_drift(drift)
