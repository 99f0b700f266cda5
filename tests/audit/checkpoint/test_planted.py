"""Real audits of models whose answer is known: planted faults, and healthy models. SmolLM2: `benchmarks/verdicts.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.verdicts import SMALL, audited, scale_logits, shift_logits, small_cases, small_model, train


@torch.no_grad()
def dead_feature(model: Any) -> None:
    """The final norm of Phi has a bias too; the rest is that of `raise_gain`."""
    model.model.final_layernorm.weight[0] = 0
    model.model.final_layernorm.bias[0] = 0
    weight = model.lm_head.weight.detach().clone()
    weight[:, 0] = 5e4
    model.lm_head.weight = nn.Parameter(weight)


@pytest.mark.parametrize(
    ("plant", "expected", "said"),
    [
        (lambda model: None, "nothing", "Nothing measured"),
        (shift_logits, "center", "Center the output head"),
        (scale_logits, "nothing", "Nothing measured"),  # four times small logits are still small
        (lambda model: [scale_logits(model) for _ in range(4)], "not_enough_evidence", "Keep the logits in fp32 now."),
        (dead_feature, "not_enough_evidence", "zloss recommend"),
    ],
    ids=["healthy", "shifted", "larger", "heavy tail", "high gain"],
)
def test_a_planted_fault_has_its_verdict(plant: Callable[[Any], Any], expected: str, said: str, tmp_path: Path) -> None:
    checkpoint = train(small_model("phi", 0, tmp_path), 0, steps=30)
    plant(checkpoint.model)
    report = audited(checkpoint, SMALL)
    assert report.verdict.action == expected, report.verdict
    assert said in report.verdict.sentence


def test_a_shift_is_only_worth_centering_in_sixteen_bits(tmp_path: Path) -> None:
    checkpoint = train(small_model("phi", 0, tmp_path), 0, steps=30)
    shift_logits(checkpoint.model)
    noise = audited(checkpoint, SMALL).logit_noise.bf16
    # bf16 numbers near 200 are 1 apart, and those of small logits 2⁻⁷ and less.
    assert 0.1 < noise.raw < 0.5
    assert noise.raw > 20 * noise.centered
    for logits, action in (("fp32", "nothing"), ("bf16", "center")):
        assert audited(checkpoint, SMALL, logits=logits).verdict.action == action


def test_healthy_models_and_a_mixture_of_experts_need_nothing() -> None:
    cases = list(small_cases(2))
    assert [case.name for case in cases if not case.right] == []
    routed = cases[1].report
    assert routed.planned.router_share > 0
