"""Recipes in other frameworks: a setting where it is the same penalty, else the reason."""

from __future__ import annotations

import pytest

import zloss
from zloss.errors import InputError, UnknownNameError
from zloss.head.source import FRAMEWORKS


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
