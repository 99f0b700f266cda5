"""The decision map: eight stages evaluated from an audit, audits of losses and implementations, and comparisons of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zloss.decide import checkpoint_stages as checkpoint
from zloss.decide import stages
from zloss.decide import training_stages as training
from zloss.decide.budget import lambda_budget
from zloss.decide.implementation_stage import implementation
from zloss.decide.router_stage import router_reduction
from zloss.decide.stage_outcome import StageOutcome, decision, unevaluated
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.router import MeasuredScale
from zloss.results.router_scale import RouterScaleTable
from zloss.results.update_error import UpdateError


def decide(
    report: AuditReport | None,
    *,
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    update_errors: Sequence[UpdateError] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
    thresholds: Thresholds | None = None,
) -> tuple[Decision, ...]:
    """All eight stages in the order source → transport → optimizer → quality; an unevaluated one has fired None.

    Thresholds are those given, else those stored in the report, else the defaults.
    """
    limits = thresholds or stored_thresholds(report.thresholds if report else {})
    report = report and report.finite()
    on_checkpoint = {
        stages.SOURCE: checkpoint.source_coordinate,
        stages.DECOMPOSITION: checkpoint.objective_decomposition,
        stages.TRANSPORT: checkpoint.architectural_transport,
        stages.PATHWAY: checkpoint.shared_pathway,
    }
    outcomes: dict[stages.Stage, StageOutcome] = {
        stage: unevaluated(stage, "no audit of a checkpoint was given") if report is None else evaluate(report, limits)
        for stage, evaluate in on_checkpoint.items()
    }
    outcomes[stages.IMPLEMENTATION] = implementation(loss_audits, limits, update_errors, implementation_audits)
    outcomes[stages.ROUTER] = router_reduction(report, comparisons, limits, routers)
    outcomes[stages.OPTIMIZER] = training.optimizer_consequence(comparisons, limits, implementation_audits)
    outcomes[stages.QUALITY] = training.quality_gate(comparisons, limits)
    return tuple(decision(stage, outcomes[stage]) for stage in stages.STAGES)


def with_decisions(
    report: AuditReport,
    *,
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    routers: Sequence[MeasuredScale | RouterScaleTable] = (),
    thresholds: Thresholds | None = None,
) -> AuditReport:
    """The report with its decisions, λ budget and the thresholds they used."""
    limits = thresholds or stored_thresholds(report.thresholds)
    return replace(
        report,
        decisions=decide(
            report,
            loss_audits=loss_audits,
            comparisons=comparisons,
            implementation_audits=implementation_audits,
            routers=routers,
            thresholds=limits,
        ),
        lambda_budget=lambda_budget(report.finite(), limits.r_z_budget),
        thresholds=limits.to_dict(),
    )
