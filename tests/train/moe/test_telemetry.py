"""Numbers of the routers of one step: masked decisions are left out of every one."""

from __future__ import annotations

import pytest
import torch

import zloss
from zloss.results.moe_config import MoeRun
from zloss.train.moe.loss import RouterTerms
from zloss.train.moe.telemetry import router_numbers

LAYERS, TOKENS, EXPERTS, WIDTH, TOP_K = 2, 6, 4, 8, 2


def test_masked_decisions_are_in_no_number() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(EXPERTS, WIDTH, generator=generator) for _ in range(LAYERS)]
    logits = [torch.randn(TOKENS, EXPERTS, generator=generator) for _ in range(LAYERS)]
    loud = [layer.clone() for layer in logits]
    for layer in loud:
        layer[-2:] += 100.0
    mask = torch.tensor([True] * 4 + [False] * 2)
    moe = MoeRun(top_k=TOP_K, experts=EXPERTS, layers=LAYERS, router="token_layer_mean", router_coef=1e-3)

    def numbers(given: list[torch.Tensor], kept: torch.Tensor | None) -> dict[str, float | None]:
        record = zloss.router_loss(
            given, coef=1e-3, convention="token_layer_mean", top_k=TOP_K, mask=kept, weight=weights
        )
        return router_numbers([RouterTerms(torch.ones(()), torch.ones(()), record.loss.detach(), record)], moe, 4)

    masked, short = numbers(loud, mask), numbers([layer[:4] for layer in logits], None)
    assert masked == {name: pytest.approx(value) for name, value in short.items()}
    assert masked["router_log_z_max"] is not None
    assert masked["router_log_z_max"] < 10
