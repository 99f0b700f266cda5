"""Results with every decision about them, computed once: what pages, files and the terminal show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zloss.decide.bottom_line import bottom_line, ordered_actions
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.joined_models import joined_models
from zloss.decide.quality import JudgedComparison, judge_comparison
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision, DecisionMap
from zloss.results.drift import Drift
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale
from zloss.results.router_scale import RouterScaleTable


@dataclass(frozen=True)
class DecidedResults:
    """Audits, audits of losses and implementations, comparisons and router scales, decided together; reproductions,
    drifts and recommendations beside them."""

    audits: tuple[AuditReport, ...] = ()
    """Each with its own decision map, which the other results fill too."""
    loss_audits: tuple[LossAudit, ...] = ()
    comparisons: tuple[JudgedComparison, ...] = ()
    shared: DecisionMap | None = None
    """The one map where there is no audit; None beside it means that nothing was given that a map is made of."""
    router_scales: tuple[RouterScaleTable, ...] = ()
    measured_routers: tuple[MeasuredScale, ...] = ()
    reproductions: tuple[ReproductionRecord, ...] = ()
    """Shown with their own claims and verdicts; no stage reads them."""
    implementation_audits: tuple[ImplementationAudit, ...] = ()
    drifts: tuple[Drift, ...] = ()
    """Each with its own judgement, made when it was measured; no stage reads them."""
    recommendations: tuple[Recommendation, ...] = ()
    """Each with its own map of eight stages."""

    def __post_init__(self) -> None:
        if any(not audit.decisions for audit in self.audits):
            raise InputError("an audit without decisions was given: call `decide_results` or `with_decisions` first.")

    @property
    def maps(self) -> tuple[DecisionMap, ...]:
        """The map of each audit by its name, or the shared one."""
        if self.shared is not None:
            return (replace(self.shared, models=self._models(None)),)
        return tuple(
            replace(_map(name, audit.thresholds, audit.decisions), models=self._models(audit))
            for name, audit in zip(audit_names(self.audits), self.audits, strict=True)
        )

    def _models(self, audit: AuditReport | None) -> str | None:
        compared = [judged.comparison for judged in self.comparisons]
        return joined_models(audit, self.loss_audits, self.implementation_audits, compared)


def decide_results(
    audits: Sequence[AuditReport] = (),
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    thresholds: Thresholds | None = None,
    *,
    router_scales: Sequence[RouterScaleTable] = (),
    measured_routers: Sequence[MeasuredScale] = (),
    reproductions: Sequence[ReproductionRecord] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    drifts: Sequence[Drift] = (),
    recommendations: Sequence[Recommendation] = (),
) -> DecidedResults:
    """Evaluate the decision map of each audit, or one map; without `thresholds` an audit keeps those stored in it."""
    limits = thresholds or Thresholds()
    shared = None
    routers: list[MeasuredScale | RouterScaleTable] = [*measured_routers, *router_scales]
    given: dict[str, Any] = {
        "loss_audits": loss_audits,
        "comparisons": comparisons,
        "implementation_audits": implementation_audits,
        "routers": routers,
    }
    if not audits and (any(given.values()) or not (reproductions or drifts or recommendations)):
        shared = _map(None, limits.to_dict(), decide(None, **given, thresholds=limits))
    return DecidedResults(
        audits=tuple(with_decisions(audit, **given, thresholds=thresholds) for audit in audits),
        loss_audits=tuple(loss_audits),
        comparisons=tuple(
            judge_comparison(comparison, limits, stated_thresholds=thresholds is not None) for comparison in comparisons
        ),
        shared=shared,
        router_scales=tuple(router_scales),
        measured_routers=tuple(measured_routers),
        reproductions=tuple(reproductions),
        implementation_audits=tuple(implementation_audits),
        drifts=tuple(drifts),
        recommendations=tuple(recommendations),
    )


def _map(name: str | None, thresholds: dict[str, float | None], decisions: tuple[Decision, ...]) -> DecisionMap:
    order = tuple(decision.stage for decision in ordered_actions(decisions))
    return DecisionMap(name, thresholds, decisions, bottom_line(decisions), order)


def audit_names(audits: Sequence[AuditReport]) -> list[str]:
    """Short, distinct names: the model, with the corpus or a number where models repeat."""
    models = [report.model.name for report in audits]
    names = [
        m if models.count(m) == 1 else f"{m} · {report.corpus.name}" for m, report in zip(models, audits, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
