"""What a few plain fp64 calls show about a loss, without the audit: the independent check of written truths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.audit.loss.further import PROBE_VOCAB, total_of
from tests.audit.loss.zoo import IGNORE

Loss = Callable[..., Any]

OBSERVABLE = frozenset(
    {
        "all_ignored_nonfinite",
        "forward_backward_mismatch",
        "ignored_tokens_leak",
        "not_repeatable",
        "overflow",
        "overwrites_input",
        "upstream_ignored",
    }
)
"""The findings that `observed` can see."""


def batch(options: dict[str, Any], *, tokens: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    """fp64 logits [T, V] around 8, and labels of which every fifth is ignored."""
    draw = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(tokens, PROBE_VOCAB, generator=draw, dtype=torch.float64) + 8
    y = torch.randint(1, options.get("valid_vocab", PROBE_VOCAB), (tokens,), generator=draw)
    return z, torch.where(torch.arange(tokens) % 5 == 2, options.get("ignore_index", IGNORE), y)


def of_logits(loss: Loss, options: dict[str, Any]) -> Callable[[Tensor, Tensor], Any]:
    """`loss` as a function of logits: hidden states are the identity and the weight is the transposed logits."""
    if not options.get("linear"):
        return loss
    return lambda z, y: loss(torch.eye(len(y), dtype=z.dtype, requires_grad=True), z.T, y)


def value_and_gradient(
    loss: Callable[[Tensor, Tensor], Any], z: Tensor, y: Tensor, upstream: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The trained scalar and `upstream` times its gradient at the logits."""
    leaf = z.clone().requires_grad_()
    value = total_of(loss(leaf, y.clone()))
    (grad,) = torch.autograd.grad(upstream * value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(z) if grad is None else grad


def carried(y: Tensor, ignore: int, *, shifted: bool) -> Tensor:
    """The rows that carry a loss; with shifted labels row t carries the label of t + 1."""
    keep = y != ignore
    return torch.cat([keep[1:], keep.new_zeros(1)]) if shifted else keep


def observed(loss: Loss, options: dict[str, Any], *, shifted: bool = False) -> set[str]:
    """The ids of `OBSERVABLE` that are true of a loss."""
    return set(_observed(of_logits(loss, options), options, shifted))


def _observed(loss: Callable[[Tensor, Tensor], Any], options: dict[str, Any], shifted: bool) -> Iterator[str]:
    z, y = batch(options)
    ignore = options.get("ignore_index", IGNORE)
    keep = carried(y, ignore, shifted=shifted)
    value, grad = value_and_gradient(loss, z, y)
    again = [value_and_gradient(loss, z, y) for _ in range(4)]
    if not all(torch.equal(a, value) and torch.equal(b, grad) for a, b in again):
        yield "not_repeatable"
        return  # nothing else could be measured
    rough = value.dtype != torch.float64  # computes in fp32 or less

    empty = torch.full_like(y, ignore)
    hostile = z if options.get("linear") else torch.where(keep[:, None], z, torch.inf)  # a weight is shared by all rows
    with torch.no_grad():
        through_mask = total_of(loss(hostile.clone(), y.clone()))
    if not all(part.isfinite().all() for part in (*value_and_gradient(loss, z, empty), through_mask)):
        yield "all_ignored_nonfinite"
    if grad[~keep].any():
        yield "ignored_tokens_leak"

    given, labels = z.clone().requires_grad_(), y.clone()
    loss(given, labels)
    if not torch.equal(given.detach(), z) or not torch.equal(labels, y):
        yield "overwrites_input"

    large = [z + 100, z - 100, 300 * (z - 8)]
    if not all(part.isfinite().all() for x in large for part in value_and_gradient(loss, x, y)):
        yield "overflow"

    tripled = value_and_gradient(loss, z, y, 3.0)[1]
    if (tripled - 3 * grad).norm() > 4e-3 * tripled.norm() or not _per_token_follows(options.get("per_token"), z, y):
        yield "upstream_ignored"

    draw = torch.Generator().manual_seed(2)
    direction = 1 + torch.randn(z.shape, generator=draw, dtype=z.dtype)
    step, tolerance = (2e-2, 5e-3) if rough else (1e-4, 1e-6)
    with torch.no_grad():
        ahead, behind = (total_of(loss(z + side * step * direction, y.clone())) for side in (1, -1))
    slope, claimed = float(ahead.double() - behind.double()) / (2 * step), float((grad * direction).sum())
    if not abs(slope - claimed) <= tolerance * max(abs(slope), float(grad.norm())):
        yield "forward_backward_mismatch"


def _per_token_follows(per_token: Loss | None, z: Tensor, y: Tensor) -> bool:
    """Whether random upstream gradients of the tokens scale the rows of the gradient."""
    if per_token is None:
        return True
    upstream = torch.linspace(-1, 2, len(y), dtype=z.dtype)
    grads = []
    for weight in (upstream, torch.ones_like(upstream)):
        leaf = z.clone().requires_grad_()
        rows = per_token(leaf, y.clone())
        grads.append(torch.autograd.grad(rows, leaf, weight.to(rows.dtype))[0])
    return bool((grads[0] - upstream[:, None] * grads[1]).norm() <= 1e-5 * grads[1].norm())
