"""What is written of the losses of `FURTHER`, `UNSEEN` and `correct` holds in plain fp64 autograd; the audit is not called."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.audit.loss.correct import Recipe, correct_losses, recipes
from tests.audit.loss.further import FURTHER, Case, gradient_error
from tests.audit.loss.observed import OBSERVABLE, observed, remainder
from tests.audit.loss.unseen import OUTSIDE, UNSEEN

NUMBERS = {name: case for name, case in {**FURTHER, **UNSEEN}.items() if gradient_error(case) is not None}
CORRECT = {name: truth for name, _, _, truth in correct_losses()}
RECIPES = dict(recipes())


@pytest.mark.parametrize("name", NUMBERS)
def test_the_gradient_is_that_of_the_declared_numbers(name: str) -> None:
    error, tolerance = gradient_error(NUMBERS[name]), NUMBERS[name].tolerance
    assert error is not None
    assert error < (tolerance if tolerance > 1e-5 else 1e-9)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_plain_calls_show_is_declared_and_what_is_declared_shows(name: str) -> None:
    case = UNSEEN[name]
    seen = observed(case.loss, case.options, shifted=case.more.get("targets") == "shifted")
    assert seen <= case.must | case.one_of | case.may
    assert case.must & OBSERVABLE <= seen
    assert not case.must_not & seen


@pytest.mark.parametrize("name", OUTSIDE)
def test_losses_outside_the_family_have_a_source_outside_its_three_shapes(name: str) -> None:
    assert remainder(UNSEEN[name].loss, UNSEEN[name].options) > 1e-4


@pytest.mark.parametrize("name", [name for name in UNSEEN if name not in OUTSIDE])
def test_the_other_losses_stay_within_the_three_shapes(name: str) -> None:
    """Except where logits are scaled or cut, labels are shifted, or the source itself is damaged."""
    case = UNSEEN[name]
    apart = {"flash-attn module", "learned temperature", "padding bias", "padding masked in place"}
    damaged = {"gradient kept in bf16", "backward without the last columns"}
    inside = name not in apart | damaged and case.more.get("targets") != "shifted"
    assert (remainder(case.loss, case.options) < 1e-9) is inside


@pytest.mark.parametrize("name", ["Megatron layout", "HF loss with num_items", "KL to uniform", "Z and max-z"])
def test_a_wrong_truth_fails(name: str) -> None:
    case = UNSEEN[name]
    assert case.coef is not None
    if case.formula is None:
        error = gradient_error(replace(case, coef=1.01 * case.coef))
    else:
        formula = case.formula
        error = gradient_error(
            replace(case, formula=lambda z, y: formula(z, y) + 1e-6 * z.logsumexp(-1).square().mean())
        )
    assert error is not None
    assert error > 1e-9


@pytest.mark.parametrize("name", CORRECT)
def test_a_generated_loss_has_the_gradient_of_its_formula_and_nothing_else_is_wrong(name: str) -> None:
    truth = CORRECT[name]
    error = gradient_error(truth)
    assert error is not None
    assert error < (5e-5 if RECIPES[name].precision == "fp32" else 1e-8)
    shifted = truth.more["targets"] == "shifted"
    # Among others: all ignored, inputs, repetition.
    assert observed(truth.loss, truth.options, shifted=shifted) <= truth.may


def test_every_shape_of_code_occurs() -> None:
    assert len(CORRECT) == 200
    drawn = {
        axis: Counter(getattr(recipe, axis) for recipe in RECIPES.values()) for axis in Recipe.__dataclass_fields__
    }
    assert drawn["style"]["compiled"] == 4
    expected = {
        "objective": 4, "ignore": 3, "reduction": 3, "constant": 4, "linear": 2, "shift": 3, "precision": 3, "organisation": 4,
        "mask": 4, "log_z": 4, "cross_entropy": 3, "style": 6, "returns": 7, "smoothing": 3, "class_weights": 2, "target": 5,
    }  # fmt: skip
    for axis, kinds in expected.items():
        assert len(drawn[axis]) == kinds, axis
        assert min(drawn[axis].values()) >= 4, axis
    coefs = [recipe.coef for recipe in RECIPES.values()]
    assert min(coefs) < 3e-5
    assert max(coefs) > 3e-2


def test_another_seed_draws_other_losses_and_the_same_seed_the_same() -> None:
    assert dict(recipes()) == RECIPES
    assert set(dict(recipes(seed=1)).values()) != set(RECIPES.values())


@pytest.mark.parametrize(
    "change", [{"coef": 1.001e-3}, {"target": 0.01}, {"objective": "centered"}, {"reduction": "all"}]
)
def test_a_generated_loss_that_computes_something_else_fails(change: dict[str, Any]) -> None:
    recipe = Recipe()
    truth = Case(recipe, "", True, recipe.coef, formula=recipe.formula)
    assert (gradient_error(truth) or 0.0) < 1e-12
    assert (gradient_error(replace(truth, loss=replace(recipe, **change))) or 0.0) > 1e-7
