"""The generated losses are correct: checked in fp64 against plain formulas, without the audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.audit.loss.correct import Recipe, correct_losses, recipes
from tests.audit.loss.further import Case, gradient_error, total_of
from tests.audit.loss.observed import batch, observed, of_logits, value_and_gradient

LOSSES = {name: (loss, options, truth) for name, loss, options, truth in correct_losses()}
RECIPES = dict(recipes())


def rounding(recipe: Recipe) -> float:
    return 5e-5 if recipe.precision == "fp32" else 1e-8


def reported_z(out: Any) -> float | None:
    """The Z that a loss returns next to its scalar."""
    if isinstance(out, tuple) and isinstance(out[-1], dict):
        out = out[-1]
    if isinstance(out, dict):
        return float(out["z_loss"])
    if hasattr(out, "z_loss"):
        return float(out.z_loss)
    return float(out[1]) if isinstance(out, tuple) and out[0].dim() == 0 else None


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_formula_and_nothing_else_is_wrong(name: str) -> None:
    loss, options, truth = LOSSES[name]
    error = gradient_error(truth)
    assert error is not None
    assert error < rounding(RECIPES[name])
    shifted = truth.more["targets"] == "shifted"
    assert observed(loss, options, shifted=shifted) <= truth.may  # among others: all ignored, inputs, repetition


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_reported_z_are_those_of_the_formula(name: str) -> None:
    loss, options, _ = LOSSES[name]
    recipe = RECIPES[name]
    z, y = batch(options)
    labels = torch.where(y == recipe.ignore, -100, y)
    value = recipe.formula(z, labels)
    out = of_logits(loss, options)(z.clone().requires_grad_(), y)
    assert float(total_of(out).detach()) == pytest.approx(float(value), rel=1e-5)
    if (z_loss := reported_z(out)) is not None:
        without = replace(recipe, coef=0.0).formula(z, labels)
        assert z_loss == pytest.approx(float(value - without), rel=1e-4)
    else:
        assert recipe.returns in ("scalar", "(logits, loss)")


@pytest.mark.parametrize("name", LOSSES)
def test_bf16_inputs_get_the_same_loss_in_fp32(name: str) -> None:
    loss, options, _ = LOSSES[name]
    z, y = batch(options)
    narrow = z.bfloat16()
    on_logits = of_logits(loss, options)
    value, grad = value_and_gradient(on_logits, narrow, y)
    exact, expected = value_and_gradient(on_logits, narrow.double(), y)
    assert value.dtype in (torch.float32, torch.float64)
    assert float(value) == pytest.approx(float(exact), rel=1e-5)
    assert (grad.double() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.linear])
def test_linear_losses_train_dense_hidden_states_and_weight(name: str) -> None:
    loss, _, _ = LOSSES[name]
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 7, generator=draw, dtype=torch.float64, requires_grad=True) for n in (50, 30))
    target = 1 + torch.arange(50) % 29
    target[::4] = RECIPES[name].ignore
    by_code = torch.autograd.grad(total_of(loss(hidden, weight, target)), (hidden, weight))
    labels = torch.where(target == RECIPES[name].ignore, -100, target)
    plainly = torch.autograd.grad(RECIPES[name].formula(hidden @ weight.T, labels, weight), (hidden, weight))
    for a, b in zip(by_code, plainly, strict=True):
        assert (a - b).norm() < rounding(RECIPES[name]) * b.norm()


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
