"""The logit source outside a loss: head gradients by blocks of rows, the paper's listing, recipes in other frameworks."""

from __future__ import annotations

import inspect

import pytest
import torch

import zloss
from tests.laws.definitions import make_case, relative_error
from zloss.errors import InputError, ReductionError, UnknownNameError
from zloss.head import source
from zloss.head.arguments import prepare_head
from zloss.head.options import HeadOptions
from zloss.head.source import FRAMEWORKS, head_gradient_rows
from zloss.objectives import Coefficients

# Head gradients by blocks of rows: they equal those of the head loss, also where autocast rounds its operands.


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy_at_weight_and_bias(
    autocast: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_BLOCK_BYTES", 4 * 37 * 20)  # three blocks of rows
    case = make_case(zloss.CrossEntropy(), with_bias=True)
    assert case.bias is not None
    leaves = [tensor.float().requires_grad_() for tensor in (case.hidden, case.weight, case.bias)]
    hidden, weight, bias = leaves
    options = HeadOptions(zloss.CrossEntropy(), logit_scale=1.5, softcap=softcap)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = zloss.head_loss(
            hidden,
            weight,
            case.target,
            zloss.CrossEntropy(),
            bias=bias,
            logit_scale=1.5,
            softcap=softcap,
            reduction="sum",
        )
        problem = prepare_head(hidden, weight, case.target, bias, options)
        ones = torch.ones(len(hidden))
        found = list(head_gradient_rows(problem, out.stats.log_z, {"ce": Coefficients(ones, ones)}))
    _, want_weight, want_bias = torch.autograd.grad(out.loss, leaves)
    assert len(found) == 3
    assert relative_error(torch.cat([rows["ce"].weight_RD for _, rows in found]), want_weight) < 2e-6
    assert relative_error(torch.cat([rows["ce"].bias_R for _, rows in found]), want_bias) < 2e-6


# The listing: same signatures, same numbers, same errors.


def test_signatures_are_those_of_the_listing() -> None:
    assert list(inspect.signature(zloss.centered_logits_from_raw).parameters) == [
        "raw_logits",
        "hidden",
        "weight",
        "bias",
    ]
    assert str(inspect.signature(zloss.z_loss_source)).startswith(
        "(logits: 'Tensor', coef: 'float', target: 'float', reduction"
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_source_is_the_gradient_of_the_penalty(reduction: str) -> None:
    logits = torch.randn(2, 5, 13, dtype=torch.float64, requires_grad=True)
    value = 0.3 * (torch.logsumexp(logits, -1) - 1.7) ** 2
    (want,) = torch.autograd.grad(value.mean() if reduction == "mean" else value.sum(), logits)
    assert relative_error(zloss.z_loss_source(logits, 0.3, 1.7, reduction), want) < 1e-14


def test_unknown_reductions_are_our_error_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="unknown reduction") as caught:
        zloss.z_loss_source(torch.zeros(2, 3), 1.0, 0.0, "average")  # type: ignore[arg-type]
    assert isinstance(caught.value, ReductionError)


# Recipes: a setting where it is the same penalty, otherwise the reason.


def test_a_raw_penalty_around_zero_has_settings() -> None:
    found = zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=50_304)
    assert {recipe.framework for recipe in found.recipes} == set(FRAMEWORKS)
    assert found["Liger"].setting == "lse_square_scale=0.0001"
    assert found["OLMo-core"].setting == "z_loss_multiplier=0.0001"
    assert found["levanter"].setting == "logsumexp_weight=0.0001"
    assert found["Megatron-LM"].setting is None
    assert "routers only" in str(found)


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (zloss.StandardZLoss(1e-4), "c = 10.8258"),
        (zloss.CenteredZLoss(1e-4), "CenteredZLoss"),
        (zloss.FactorizedZLoss(1e-4, 1e-4), "FactorizedZLoss"),
        (zloss.GainAwareZLoss(1e-4, target=0.0), "GainAwareZLoss"),
    ],
)
def test_what_cannot_be_expressed_has_the_reason(objective: zloss.Objective, reason: str) -> None:
    recipe = zloss.explain(objective, vocab=50_304)["Liger"]
    assert recipe.setting is None
    assert reason in recipe.note


def test_off_is_off() -> None:
    assert zloss.explain(zloss.StandardZLoss(None), vocab=8)["flash-attn"].setting == "lse_square_scale=0.0"
    with pytest.raises(InputError, match="vocab"):
        zloss.explain(zloss.CrossEntropy(), vocab=0)


def test_an_unknown_framework_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'Liger'"):
        zloss.explain(zloss.CrossEntropy(), vocab=8)["liger"]


def test_denominators_are_spelled_out() -> None:
    found = zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=8)
    assert "z_loss_multiplier" in found["t5x / MaxText"].note
    for name in ("Liger", "flash-attn", "OLMo-core", "t5x / MaxText", "levanter"):
        assert any(word in found[name].note for word in ("over", "Σ w", "divisor")), name
