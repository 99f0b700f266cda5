"""A mixture of experts without training it: router variants, the paper's model, the written reductions, telemetry of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import zloss
from zloss.errors import InputError, UnknownNameError
from zloss.models.routers import find_routers
from zloss.results.run_config import PAPER_CONVENTIONS, MoeRun, TrainConfig
from zloss.train.moe import (
    RouterTerms,
    Routing,
    absolute_coef,
    applied_coef,
    build_moe,
    reduced_router_loss,
    relative_scale,
    router_numbers,
    routing_metrics,
)

T, E, L, COEF, TARGET = 14, 6, 3, 0.3, math.log(6)


@pytest.mark.parametrize(
    ("router", "coef", "relative"),
    [
        ("none", 0.0, 0.0),
        ("token_layer_mean", 1e-3, 1.0),
        ("active_route_mean", 1e-3, 0.25),
        ("active_route_mean:matched", 4e-3, 1.0),
        ("active_route_sum", 1e-3, 4.0),
        ("active_route_sum:matched", 2.5e-4, 1.0),
    ],
)
def test_matching_converts_the_coefficient(router: str, coef: float, relative: float) -> None:
    moe = MoeRun(top_k=4, router=router, router_coef=0.0 if router == "none" else 1e-3)
    assert applied_coef(moe) == coef
    assert relative_scale(moe) == relative
    assert absolute_coef(moe, 512) == pytest.approx(relative * 1e-3 / (512 * 4), rel=1e-15)


def test_folders_show_the_variant() -> None:
    def name(method: str = "ce", coef: float = 0.0, **moe: Any) -> str:
        return TrainConfig(method=method, coef=coef, seed=2, moe=MoeRun(**moe)).name

    assert name() == "none-0-s2"
    assert name(router="active_route_sum:matched", router_coef=1e-3) == "active_route_sum-matched-0.001-s2"
    assert name("centered", 1e-4) == "none-0-centered-0.0001-s2"
    assert TrainConfig(seed=2).name == "ce-0-s2"


@pytest.mark.parametrize("router", ["active_route", "none:matched", "active_route_sum:match", "active_route_sum:", ""])
def test_unknown_variants_are_refused(router: str) -> None:
    with pytest.raises(UnknownNameError, match="router variant"):
        MoeRun(router=router, router_coef=1e-3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"router_coef": 1e-3}, "`none` has no penalty"),
        ({"router": "token_layer_mean", "router_coef": -1.0}, "finite number ≥ 0"),
        ({"load_balance": float("nan")}, "finite number ≥ 0"),
        ({"capacity_factor": 0.0}, "finite number > 0"),
        ({"router_target": float("inf")}, "finite number"),
        ({"top_k": 9}, "`top_k`"),
        ({"width": 30}, "multiple of `heads`"),
        ({"width": 30, "heads": 2}, "even"),
    ],
)
def test_bad_numbers_and_shapes_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        MoeRun(**fields)


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


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="`vocab`"):
        build_moe(MoeRun(), vocab=0, seed=1)


def routing(top_k: int, *, tokens: int = T, dtype: torch.dtype = torch.float64) -> Routing:
    generator = torch.Generator().manual_seed(top_k)
    logits = [2 * torch.randn(tokens, E, generator=generator, dtype=torch.float64) + 1 for _ in range(L)]
    layers = tuple(layer.to(dtype).requires_grad_() for layer in logits)
    return Routing(layers, tuple(layer.topk(top_k, dim=1).indices for layer in layers))


def by_hand(given: Routing, convention: str, top_k: int) -> float:
    """Token by token, route by route."""
    total, decisions, routes = 0.0, 0, 0
    for logits_TE, chosen_TK in zip(given.logits, given.chosen, strict=True):
        for row, experts in zip(logits_TE.tolist(), chosen_TK.tolist(), strict=True):
            phi = (math.log(sum(map(math.exp, row))) - TARGET) ** 2
            decisions += 1
            routes += len(experts)
            total += sum(phi for _ in experts) if convention == "active_route_sum" else phi
    assert routes == top_k * decisions
    return COEF * total / (routes if convention == "active_route_mean" else decisions)


def gradients(loss: Tensor, given: Routing) -> Tensor:
    return torch.cat(torch.autograd.grad(loss, given.logits, retain_graph=True))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("convention", PAPER_CONVENTIONS)
def test_the_written_form_is_the_loop_and_the_factor_form(convention: str, top_k: int) -> None:
    given = routing(top_k)
    written = reduced_router_loss(given, convention=convention, coef=COEF, target=TARGET, step_tokens=T)
    assert float(written.detach()) == pytest.approx(by_hand(given, convention, top_k), rel=1e-13)
    factor = zloss.router_loss(given.logits, coef=COEF, convention=convention, top_k=top_k, target=TARGET)
    assert float(written.detach()) == pytest.approx(float(factor.loss.detach()), rel=1e-13)
    torch.testing.assert_close(gradients(written, given), gradients(factor.loss, given), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("convention", PAPER_CONVENTIONS)
def test_parts_of_a_step_add_up_and_own_counts_do_not(convention: str) -> None:
    given, half = routing(3), T // 2
    whole = reduced_router_loss(given, convention=convention, coef=COEF, target=TARGET, step_tokens=T)

    def parts(step_tokens: int) -> Tensor:
        cuts = [
            Routing(tuple(x[s] for x in given.logits), tuple(x[s] for x in given.chosen))
            for s in (slice(0, half), slice(half, T))
        ]
        losses = [
            reduced_router_loss(cut, convention=convention, coef=COEF, target=TARGET, step_tokens=step_tokens)
            for cut in cuts
        ]
        return losses[0] + losses[1]

    torch.testing.assert_close(gradients(parts(T), given), gradients(whole, given), rtol=1e-12, atol=1e-16)
    wrong = gradients(parts(half), given)  # each micro-batch divided by its own count: twice the coefficient
    torch.testing.assert_close(wrong, 2 * gradients(whole, given), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("top_k", [2, 3, 4])
@pytest.mark.parametrize("convention", PAPER_CONVENTIONS[1:])
def test_a_matched_coefficient_gives_the_token_layer_mean_s_gradient(convention: str, top_k: int) -> None:
    """In fp32: the same bits where k is a power of two, within a rounding of the coefficient where it is not."""
    given = routing(top_k, dtype=torch.float32)

    def gradient(name: str, coef: float) -> Tensor:
        return gradients(reduced_router_loss(given, convention=name, coef=coef, target=TARGET, step_tokens=T), given)

    want = gradient("token_layer_mean", COEF)
    matched = zloss.match_coefficient(COEF, "token_layer_mean", convention, layers=L, top_k=top_k)
    got = gradient(convention, matched)
    if top_k in (2, 4):
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=4e-7, atol=0)
    assert not torch.allclose(gradient(convention, COEF), want, rtol=0.1)


def test_an_unknown_convention_is_named() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'active_route_sum'"):
        reduced_router_loss(routing(2), convention="active_rout_sum", coef=1.0, target=0.0, step_tokens=T)


def test_routes_that_were_not_taken_are_counted() -> None:
    given = routing(4)
    assert given.dropped(4) == 0.0
    fewer = Routing(given.logits, (given.chosen[0], given.chosen[1], given.chosen[2][:, :1]))
    assert fewer.dropped(4) == pytest.approx(3 / 12)


def test_masked_decisions_are_in_no_number() -> None:
    layers, experts, top_k = 2, 4, 2
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(experts, 8, generator=generator) for _ in range(layers)]
    logits = [torch.randn(6, experts, generator=generator) for _ in range(layers)]
    loud = [layer.clone() for layer in logits]
    for layer in loud:
        layer[-2:] += 100.0
    mask = torch.tensor([True] * 4 + [False] * 2)
    moe = MoeRun(top_k=top_k, experts=experts, layers=layers, router="token_layer_mean", router_coef=1e-3)

    def numbers(given: list[torch.Tensor], kept: torch.Tensor | None) -> dict[str, float | None]:
        record = zloss.router_loss(
            given, coef=1e-3, convention="token_layer_mean", top_k=top_k, mask=kept, weight=weights
        )
        one = torch.ones(())
        return router_numbers([RouterTerms.of(record, one, one, record.loss, 0.0)], moe, 4)

    masked, short = numbers(loud, mask), numbers([layer[:4] for layer in logits], None)
    assert masked == {name: pytest.approx(value) for name, value in short.items()}
    assert masked["router_log_z_max"] < 10


def test_a_short_pass_counts_with_its_decisions() -> None:
    """Two passes of 10 and 4 tokens have the entropy of one pass of 14, not the mean of both passes."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(T, E, generator=generator) for _ in range(L)]
    for layer in logits:
        layer[10:] *= 10
    weights = [torch.randn(E, 8, generator=generator) for _ in range(L)]
    moe = MoeRun(top_k=2, experts=E, layers=L, router="token_layer_mean", router_coef=1e-3)

    def terms(tokens: slice) -> RouterTerms:
        part = [layer[tokens] for layer in logits]
        record = zloss.router_loss(
            part, coef=1e-3, convention="token_layer_mean", top_k=2, weight=weights, normalizer=T
        )
        one = torch.ones(())
        return RouterTerms.of(record, one, one, record.loss, 0.0)

    whole = routing_metrics([terms(slice(T))], moe, T)
    parts = routing_metrics([terms(slice(10)), terms(slice(10, T))], moe, T)
    assert whole.router is not None
    assert parts.router is not None
    assert parts.entropy == pytest.approx(whole.entropy, rel=1e-6)
    assert parts.router.entropy_per_layer == pytest.approx(whole.router.entropy_per_layer, rel=1e-6)
