"""logits_loss: the head loss for logits you already have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zloss
from tests.laws.definitions import relative_error
from zloss import errors

OBJECTIVES = (
    zloss.CrossEntropy(),
    zloss.StandardZLoss(0.7),
    zloss.CenteredZLoss(0.7),
    zloss.FactorizedZLoss(0.5, 0.9, 0.4, 2.0),
    zloss.GainAwareZLoss(0.7, beta=0.2),
)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 7, 8, generator=g, dtype=torch.float64)
    weight = torch.randn(23, 8, generator=g, dtype=torch.float64)
    target = torch.randint(19, (3, 7), generator=g)
    target[0, :2] = -100
    return (hidden @ weight.T).to(dtype), weight.to(dtype), target


@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: o.name)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equals_head_loss_with_an_identity_head(objective: zloss.Objective, reduction: str, backend: str) -> None:
    """Logits as hidden states and the identity as head: the transport drops out, the gradient is the source."""
    logits, weight, target = problem()
    vocab = logits.shape[-1]
    options = {"reduction": reduction, "valid_vocab": 19, "logit_scale": 1.3}
    smoothing = 0.1
    leaf = logits.clone().requires_grad_()
    out = zloss.logits_loss(
        leaf, target, objective, weight=weight, backend=backend, chunk_size=4, label_smoothing=smoothing, **options
    )
    upstream = torch.rand_like(out.loss)
    out.loss.backward(upstream)

    twin = logits.clone().requires_grad_()
    z = 1.3 * twin[..., :19]
    p = torch.softmax(z, -1)
    head = 1.3 * weight[:19]
    gain = (p @ head).norm(dim=-1) / p.norm(dim=-1)
    valid = target != -100
    ce = torch.nn.functional.cross_entropy(
        z.reshape(-1, 19), target.reshape(-1), reduction="none", label_smoothing=smoothing
    )
    loss = torch.where(valid, ce.reshape(target.shape) + objective.penalty(z, gain), 0.0)
    loss = {"none": loss, "sum": loss.sum(), "mean": loss.sum() / valid.sum()}[reduction]
    loss.backward(upstream)
    assert relative_error(out.loss.detach(), loss.detach()) < 1e-12
    assert relative_error(leaf.grad, twin.grad) < 1e-12
    assert out.stats.gain is not None
    assert relative_error(out.stats.gain, gain.detach()) < 1e-12
    assert vocab == 23
    assert not leaf.grad[..., 19:].any()


@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_softcap_has_its_derivative(backend: str, reduction: str, smoothing: float) -> None:
    """With label smoothing the source along 1/V goes through the slope of every logit."""
    logits, weight, target = problem()
    for objective in (zloss.StandardZLoss(0.7), zloss.GainAwareZLoss(0.7)):
        leaf, twin = (logits.clone().requires_grad_() for _ in range(2))
        capped = 4 * torch.tanh(1.5 * twin / 4)
        p = torch.softmax(capped, -1)
        gain = 1.5 * ((p * (1 - (capped / 4) ** 2)) @ weight).norm(dim=-1) / p.norm(dim=-1)
        ce = torch.nn.functional.cross_entropy(
            capped.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
        )
        per_token = torch.where(target != -100, ce.view(3, 7) + objective.penalty(capped, gain), 0.0)
        options = {"softcap": 4.0, "logit_scale": 1.5, "label_smoothing": smoothing, "chunk_size": 4}
        out = zloss.logits_loss(leaf, target, objective, weight=weight, reduction=reduction, backend=backend, **options)
        assert out.stats.mu is None
        out.loss.sum().backward()
        per_token.sum().backward()
        assert relative_error(leaf.grad, twin.grad) < 1e-12


def test_ignored_rows_may_hold_anything() -> None:
    logits, _weight, target = problem()
    for backend in ("dense", "chunked"):
        clean, dirty = logits.clone(), logits.clone()
        dirty[0, 0], dirty[0, 1] = torch.nan, -torch.inf
        grads = []
        for x in (clean, dirty):
            leaf = x.requires_grad_()
            zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7), backend=backend).loss.backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)


def test_minus_infinity_where_it_cannot_be() -> None:
    logits, _weight, target = problem()
    masked = logits.clone()
    masked[..., 20:] = -torch.inf
    for backend in ("dense", "chunked"):
        assert torch.isfinite(zloss.logits_loss(masked, target, zloss.StandardZLoss(0.7), backend=backend).loss)
        with pytest.raises(errors.CoordinateError, match="mean logit"):
            zloss.logits_loss(masked, target, zloss.CenteredZLoss(0.7), backend=backend)
        with pytest.raises(errors.CoordinateError, match="label_smoothing"):
            zloss.logits_loss(masked, target, zloss.CrossEntropy(), label_smoothing=0.1, backend=backend)
        capped = zloss.logits_loss(masked, target, zloss.StandardZLoss(0.7), softcap=3.0, backend=backend)
        cut = zloss.logits_loss(logits[..., :20], target, zloss.CrossEntropy(), softcap=3.0, backend=backend)
        assert relative_error(capped.stats.log_z, cut.stats.log_z) < 1e-12
        masked_row = logits.clone()
        masked_row[1, 1] = -torch.inf
        with pytest.raises(errors.CoordinateError, match="only -inf"):
            zloss.logits_loss(masked_row, target, zloss.StandardZLoss(0.7), backend=backend)


def test_low_precision_logits_are_read_in_fp32() -> None:
    logits, _weight, target = problem(torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    out = zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7))
    truth = zloss.logits_loss(logits.double(), target, zloss.StandardZLoss(0.7), backend="dense")
    assert out.loss.dtype == torch.float32
    assert relative_error(out.loss.detach(), truth.loss) < 1e-6
    out.loss.backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_bad_input() -> None:
    logits, weight, target = problem()
    with pytest.raises(errors.InputError, match="pass `weight`"):
        zloss.logits_loss(logits, target, zloss.GainAwareZLoss(0.7))
    with pytest.raises(errors.ShapeError, match="logits"):
        zloss.logits_loss(target, target, zloss.CrossEntropy())
    with pytest.raises(errors.ShapeError, match="weight"):
        zloss.logits_loss(logits, target, zloss.CrossEntropy(), weight=weight.T)
    leaf = logits.requires_grad_()
    with pytest.raises(errors.DoubleBackwardError):
        torch.autograd.grad(zloss.logits_loss(leaf, target, zloss.CrossEntropy()).loss, leaf, create_graph=True)


def test_leaf_logits_can_be_differentiated_again_and_again_and_are_left_alone() -> None:
    logits, _, target = problem(torch.float32)
    leaf = logits.clone().requires_grad_()
    loss = zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7)).loss
    for count in (1, 2, 3):
        loss.backward(retain_graph=True)
        (once,) = torch.autograd.grad(zloss.logits_loss(leaf, target, zloss.StandardZLoss(0.7)).loss, leaf)
        assert relative_error(leaf.grad, count * once) < 1e-6
    assert torch.equal(leaf.detach(), logits)
