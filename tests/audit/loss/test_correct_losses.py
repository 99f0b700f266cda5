"""The generated losses are correct: checked in fp64 against plain formulas, without the audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.audit.loss.correct import Recipe, correct_losses, recipes
from tests.audit.loss.further import Case, gradient_error
from tests.audit.loss.observed import observed

LOSSES = {name: (loss, options, truth) for name, loss, options, truth in correct_losses()}
RECIPES = dict(recipes())


def rounding(recipe: Recipe) -> float:
    return 5e-5 if recipe.precision == "fp32" else 1e-8


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_formula_and_nothing_else_is_wrong(name: str) -> None:
    loss, options, truth = LOSSES[name]
    error = gradient_error(truth)
    assert error is not None
    assert error < rounding(RECIPES[name])
    shifted = truth.more["targets"] == "shifted"
    assert observed(loss, options, shifted=shifted) <= truth.may  # among others: all ignored, inputs, repetition


def test_every_shape_of_code_occurs() -> None:
    assert len(LOSSES) == 200
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
def test_a_loss_that_computes_something_else_fails(change: dict[str, Any]) -> None:
    recipe = Recipe()
    truth = Case(recipe, "", True, recipe.coef, formula=recipe.formula)
    assert (gradient_error(truth) or 0.0) < 1e-12
    assert (gradient_error(replace(truth, loss=replace(recipe, **change))) or 0.0) > 1e-7
