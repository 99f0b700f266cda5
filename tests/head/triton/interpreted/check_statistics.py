"""The Triton backend returns the planned statistics, for losses from hidden states and from logits."""

from __future__ import annotations

import torch

from tests.laws.present_statistics import FEW, broken


def test_the_planned_statistics() -> None:
    assert not broken("triton", tokens=4, dtype=torch.float32, tolerance=2e-5, objectives=FEW)
