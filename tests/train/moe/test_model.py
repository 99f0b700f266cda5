"""The paper's 8-expert model."""

from __future__ import annotations

import pytest
import torch

from zloss.errors import InputError
from zloss.integrations.moe import attach_router_loss
from zloss.models.routers import find_routers
from zloss.results.moe_config import MoeRun
from zloss.train.moe.model import build_moe


@pytest.mark.parametrize("top_k", [2, 4])
def test_shape_is_the_paper_s(top_k: int) -> None:
    model = build_moe(MoeRun(top_k=top_k), vocab=512, seed=1)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (4, 256, 4)
    assert (config.num_experts, config.num_experts_per_tok, config.router_aux_loss_coef) == (8, top_k, 0.01)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert find_routers(model).top_k == top_k


def test_a_seed_fixes_the_weights_and_leaves_the_global_state() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (build_moe(MoeRun(), vocab=128, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_matched_conventions_take_the_same_training_step() -> None:
    """Three steps of token-layer mean and of a matched active-route sum end in the same weights, bit for bit."""
    shape = MoeRun(layers=2, width=32, heads=2, expert_width=16)
    ids = torch.randint(64, (3, 2, 16), generator=torch.Generator().manual_seed(0))
    ends = []
    for convention, coef in (("token_layer_mean", 1e-3), ("active_route_sum", 1e-3 / 4), ("active_route_sum", 1e-3)):
        model = build_moe(shape, vocab=64, positions=16, seed=5).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with attach_router_loss(model, coef=coef, convention=convention, target=0.0):
            for batch in ids:
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(model.state_dict())
    mean, matched, unmatched = ends
    assert all(torch.equal(mean[name], matched[name]) for name in mean)
    assert any(not torch.equal(mean[name], unmatched[name]) for name in mean)


def test_an_odd_width_of_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="even"):
        MoeRun(width=30, heads=2)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(InputError, match="`top_k`"):
        MoeRun(top_k=9)
    with pytest.raises(InputError, match="multiple of `heads`"):
        MoeRun(width=30)
    with pytest.raises(InputError, match="`vocab`"):
        build_moe(MoeRun(), vocab=0, seed=1)
