"""The written reductions against the factor form and against loops in fp64; wrong denominators are noticed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import zloss
from zloss.errors import UnknownNameError
from zloss.results.moe_config import PAPER_CONVENTIONS
from zloss.train.moe.reduction import reduced_router_loss
from zloss.train.moe.routing import Routing

T, E, L, COEF, TARGET = 14, 6, 3, 0.3, math.log(6)


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
