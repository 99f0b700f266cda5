"""The decision map: eight stages evaluated from an audit, audits of losses and comparisons of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zloss.decide import checkpoint_stages as checkpoint
from zloss.decide import stages
from zloss.decide import training_stages as training
from zloss.decide.budget import lambda_budget
from zloss.decide.stage_finding import Finding, decision, unevaluated
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.results.audit import AuditReport, Decision
from zloss.results.comparison_view import view_comparison


def decide(
    report: AuditReport | None,
    *,
    loss_audits: Sequence[dict[str, Any]] = (),
    comparisons: Sequence[dict[str, Any]] = (),
    thresholds: Thresholds | None = None,
) -> tuple[Decision, ...]:
    """All eight stages in the order source → transport → optimizer → quality; what cannot be evaluated has fired None.

    Thresholds are those given, else those stored in the report, else the defaults.
    """
    limits = thresholds or stored_thresholds(report.thresholds if report else {})
    report = report and report.finite()
    views = [view_comparison(comparison) for comparison in comparisons]
    on_checkpoint = {
        stages.SOURCE: checkpoint.source_coordinate,
        stages.DECOMPOSITION: checkpoint.objective_decomposition,
        stages.TRANSPORT: checkpoint.architectural_transport,
        stages.PATHWAY: checkpoint.shared_pathway,
    }
    findings: dict[stages.Stage, Finding] = {
        stage: unevaluated(stage, "no audit of a checkpoint was given") if report is None else evaluate(report, limits)
        for stage, evaluate in on_checkpoint.items()
    }
    findings[stages.IMPLEMENTATION] = training.implementation(loss_audits, limits)
    findings[stages.ROUTER] = training.router_reduction(report.router if report else None, views, limits)
    findings[stages.OPTIMIZER] = training.optimizer_consequence(views, limits)
    findings[stages.QUALITY] = training.quality_gate(views, limits)
    return tuple(decision(stage, findings[stage]) for stage in stages.STAGES)


def with_decisions(
    report: AuditReport,
    *,
    loss_audits: Sequence[dict[str, Any]] = (),
    comparisons: Sequence[dict[str, Any]] = (),
    thresholds: Thresholds | None = None,
) -> AuditReport:
    """The report with its decisions, λ budget and the thresholds they used."""
    limits = thresholds or stored_thresholds(report.thresholds)
    return replace(
        report,
        decisions=decide(report, loss_audits=loss_audits, comparisons=comparisons, thresholds=limits),
        lambda_budget=lambda_budget(report.finite(), limits.r_z_budget),
        thresholds=limits.to_dict(),
    )
