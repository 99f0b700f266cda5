"""Recipes in other frameworks: a setting where it is the same penalty, else the reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

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


LIGER = """
import sys, torch, zloss
from liger_kernel.transformers.functional import liger_cross_entropy
torch.manual_seed(0)
logits, target = 3 * torch.randn(6, 40), torch.tensor([3, -100, 5, 0, -100, 39])
name, value = sys.argv[1].split("=")
settings = {name: float(value)}
for reduction in ("mean", "sum"):
    ours = zloss.logits_loss(logits, target, zloss.StandardZLoss(float(value), target=0.0), reduction=reduction)
    theirs = liger_cross_entropy(logits.clone(), target, reduction=reduction, return_z_loss=True, **settings)
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs.z_loss, ours.auxiliary, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_the_setting_of_liger_is_the_same_loss() -> None:
    """Its kernel, interpreted on the CPU; with ignored tokens, under both reductions."""
    setting = zloss.explain(zloss.StandardZLoss(0.02, target=0.0), vocab=40)["Liger"].setting
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", LIGER, str(setting)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_denominators_are_spelled_out() -> None:
    found = zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=8)
    assert "z_loss_multiplier" in found["t5x / MaxText"].note
    for name in ("Liger", "flash-attn", "OLMo-core", "t5x / MaxText", "levanter"):
        assert any(word in found[name].note for word in ("over", "Σ w", "divisor")), name
