"""Arms follow the stages that fired; λ follows the R_Z budget and stays in the usual range from above."""

from __future__ import annotations

import pytest

from tests.decide.test_next_command import with_fired
from zloss.decide.recommend.candidates import budget_coef, candidates, one_digit, with_references
from zloss.results.audit import AuditReport
from zloss.results.decision import LambdaBudget
from zloss.results.recommend_plan import Arm

BUDGET = LambdaBudget(r_z=0.05, raw=3.7e-4, centered=8.2e-3)


def keys(report: AuditReport, *fired: str) -> list[tuple[str, float]]:
    return [arm.key for arm in candidates(with_fired(report, *fired, lambda_budget=BUDGET))]


def test_every_stage_proposes_its_method_in_the_order_of_actions(report: AuditReport) -> None:
    everything = keys(
        report, "Source coordinate", "Objective decomposition", "Architectural transport", "Shared pathway"
    )
    assert everything[:4] == [("centered", 1e-3), ("factorized", 3e-4), ("standard", 3e-4), ("gain-aware", 3e-4)]
    assert everything[4:] == [("centered", 1e-4), ("factorized", 3e-5), ("standard", 3e-5)]
    assert keys(report, "Source coordinate") == [("centered", 1e-3), ("centered", 1e-4)]
    assert keys(report, "Shared pathway") == [("standard", 3e-4), ("standard", 3e-5)]
    assert keys(report, "Objective decomposition")[0] == ("factorized", 3e-4)


def test_where_nothing_fired_the_usual_recipe_is_run_to_compare_with(report: AuditReport) -> None:
    (first, *_) = candidates(with_fired(report, lambda_budget=BUDGET))
    assert (first.key, first.stages) == (("standard", 3e-4), ())
    assert "no stage fired" in first.note


def test_an_arm_names_the_stages_that_proposed_it(report: AuditReport) -> None:
    found = candidates(with_fired(report, "Architectural transport", "Shared pathway", lambda_budget=BUDGET))
    assert found[0].stages == ("Architectural transport", "Shared pathway")
    assert found[1].stages == ("Architectural transport",)


@pytest.mark.parametrize(
    ("solved", "coef", "said"),
    [
        (3.7e-4, 3e-4, "λ of R_Z = 0.05"),
        (0.0873, 1e-3, "would allow 0.087"),
        (2.2e-6, 2e-6, "below the usual range"),
        (None, 1e-4, "was not measured"),
    ],
)
def test_a_coefficient_never_exceeds_its_budget(solved: float | None, coef: float, said: str) -> None:
    found, note = budget_coef(solved, 0.05)
    assert found == coef
    assert said in note


def test_rounding_is_down() -> None:
    assert [one_digit(value) for value in (1e-3, 9.99e-4, 3.0e-4, 1e-5)] == [1e-3, 9e-4, 3e-4, 1e-5]


def test_gain_aware_comes_with_standard_at_its_coefficient() -> None:
    arms = (Arm("gain-aware", 1e-4), Arm("standard", 1e-3))
    assert [arm.key for arm in with_references(arms)] == [
        ("standard", 1e-4),
        ("gain-aware", 1e-4),
        ("standard", 1e-3),
    ]
    assert with_references(arms[1:]) == arms[1:]
