"""The router stage of an audited model without routers: whose scale it is, and what there is to evaluate."""

from __future__ import annotations

from dataclasses import replace

from zloss.decide.bottom_line import bottom_line
from zloss.decide.decision_map import decide
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import Decision
from zloss.results.router import MeasuredScale
from zloss.results.router_variants import RouterVariant, RouterVariants
from zloss.router.conventions import router_scale_table

STATED = router_scale_table(1e-3, "active_route_mean", layers=4, top_k=4, tokens=64)


def router_stage(decisions: tuple[Decision, ...]) -> Decision:
    return next(one for one in decisions if one.stage == "Router reduction")


def test_a_dense_model_was_told_to_evaluate_its_router(report: AuditReport) -> None:
    stage = router_stage(decide(report))
    assert stage.fired is None
    assert stage.reason == (
        "The audited model has no router. To evaluate this stage for a model that has one: `zloss router-scale --out DIR`."
    )


def test_the_router_scale_of_another_model_passed_for_that_of_the_audited_one(
    report: AuditReport, comparison: Comparison
) -> None:
    variant = RouterVariant("active_route_mean", 1e-3, s_rel=4.0)
    runs = replace(comparison, model="experts", router=RouterVariants("ce", (variant,)))
    measured = MeasuredScale(1e-3, 0.0, (1.0,), 4.0, 4.0, (4.0,), None, 0.0)
    for decisions, source in (
        (decide(report, routers=[STATED]), "the coefficient that was stated to `zloss router-scale`"),
        (decide(report, routers=[measured]), "a router loss that was measured by itself"),
        (decide(report, comparisons=[runs]), "the compared runs of experts"),
    ):
        stage = router_stage(decisions)
        assert stage.fired is True
        assert stage.reason.endswith(f". The audited model has no router; this is of {source}.")
        assert "in the model that has the router, match the coefficient" in bottom_line((stage,))
    # Alone it is of no audited model.
    alone = router_stage(decide(None, routers=[STATED]))
    assert "audited model" not in alone.reason
    assert alone.action == "Match the coefficient so that s_rel = 1"


def test_an_audit_that_left_the_routers_out_does_not_say_that_there_are_none(report: AuditReport) -> None:
    for unknown in (replace(report, status="partial"), replace(report, reasons={"router": "left out"})):
        for decisions in (decide(unknown), decide(unknown, routers=[STATED])):
            assert "has no router" not in router_stage(decisions).reason
