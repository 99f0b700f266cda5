"""Further losses in the styles of real training code, each with what is true of it.

`FURTHER` maps a name to a `Case`. Every claim is about gradients: `coef`, `target`, `coordinate` and the denominators of a
case reproduce its gradient (`gradient_error` compares the two in fp64; `formula` replaces the declared numbers where token
weights or the like are involved). `judge` compares an audit with a case.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.audit.loss.zoo import (
    IGNORE,
    LAMBDA,
    LOG_V,
    by_hand,
    ce,
    ce_sum,
    count_of,
    fp32,
    fused_gradient,
    gradient_of,
    lse,
    mean,
    pick,
    plain,
    total,
    valid_of,
    zl,
)
from zloss.results.loss_audit import LossAudit

PROBE_VOCAB = 96


@dataclass(frozen=True)
class Case:
    """A loss and what is true of it. None as a figure means that the figure is not claimed."""

    loss: Callable[..., Any]
    has_z: bool | None
    """None: an honest tool can only say that it cannot be told."""
    coef: float | None = None
    target: float | None = None
    """c at the vocabulary of the probes (96)."""
    coordinate: str | None = None
    ce_denominator: str | None = None
    z_denominator: str | None = None
    must: frozenset[str] = frozenset()
    """Findings that have to be there."""
    one_of: frozenset[str] = frozenset()
    """At least one of these has to be there."""
    may: frozenset[str] = frozenset()
    """Findings that are true as well. Any error or warning that is in none of the three sets is wrong."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further attributes of `identified`."""
    options: dict[str, Any] = field(default_factory=dict)
    or_open: bool = False
    """`has_z` None would be a full answer too."""
    or_false: bool = False
    """`has_z` False would be one."""
    ratio: bool = False
    """`coef` is claimed relative to `ce_scale`: weights of tokens have no scale that gradients could show."""
    never_says: str = ""
    """Words that would be untrue of this loss in any sentence."""
    tolerance: float = 1e-5
    formula: Callable[..., Tensor] | None = None
    """A plain loss with the same gradient, where the declared numbers alone do not give one."""


def right(
    loss: Callable[..., Any],
    coef: float = LAMBDA,
    target: float = 0.0,
    coordinate: str = "raw",
    by: tuple[str | None, str | None] = ("valid", "valid"),
    **rest: Any,
) -> Case:
    """A correct loss: λ, c, coordinate and denominators have to be named, and nothing has to be found."""
    return Case(loss, True, coef, target, coordinate, *by, **rest)


def odd(
    loss: Callable[..., Any],
    *must: str,
    has_z: bool | None = True,
    by: tuple[str | None, str | None] | None = None,
    **rest: Any,
) -> Case:
    """A wrong or unusual loss: the findings have to be there. With `by` its Z is λ(log Z)² unless `rest` says otherwise."""
    if by is not None:
        z: dict[str, Any] = {"coef": LAMBDA, "target": 0.0, "coordinate": "raw"}
        rest = {**z, "ce_denominator": by[0], "z_denominator": by[1], **rest}
    return Case(loss, has_z, must=frozenset(must), **rest)


def open_answer(loss: Callable[..., Any], *may: str, **rest: Any) -> Case:
    """Not of the family: an honest tool says that it cannot tell."""
    return Case(loss, None, must=frozenset({"unexplained_source"}), may=frozenset(may), **rest)


def some(*ids: str) -> frozenset[str]:
    return frozenset(ids)


# Right losses in unusual code.


class CriterionWithBuffers(nn.Module):
    """λ and c are buffers, as in code that changes them from a callback."""

    coef: Tensor
    center: Tensor

    def __init__(self, coef: float, center: float) -> None:
        super().__init__()
        self.register_buffer("coef", torch.tensor(coef, dtype=torch.float64))
        self.register_buffer("center", torch.tensor(center, dtype=torch.float64))
        self.ce = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="none")

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        keep = y.ne(self.ce.ignore_index)
        deviation = torch.logsumexp(z, dim=-1).sub(self.center.to(z.dtype))
        rows = self.ce(z, y) + self.coef.to(z.dtype) * deviation.pow(2)
        return rows.masked_fill(~keep, 0.0).sum().div(keep.sum().clamp_min(1))


def levanter(z: Tensor, y: Tensor) -> Tensor:
    """One-hot targets and an einsum over [B, S, V]."""
    z, y = z.reshape(1, -1, z.shape[-1]), y.reshape(1, -1)
    onehot = F.one_hot(y.clamp(min=0), z.shape[-1]).to(z.dtype)
    log_z = torch.logsumexp(z, -1)
    rows = log_z - torch.einsum("bsv,bsv->bs", onehot, z) + 1e-4 * log_z**2
    mask = y != IGNORE
    return torch.where(mask, rows, 0.0).sum() / mask.sum().clamp(min=1)


def fused_by_hand(z: Tensor, y: Tensor) -> Tensor:
    """The gradient (1 + 2λ(log Z − c)) p − y is formed by hand; everything follows the dtype of the logits."""
    grad = fused_gradient(z.detach(), y, 3e-4, 2.5) / count_of(y)
    return by_hand(plain(z.detach(), y, 3e-4, 2.5), lambda upstream: (upstream * grad,), z)


def online_over_vocabulary(z: Tensor, y: Tensor) -> Tensor:
    """Running maximum and sum over blocks of 1,000 columns."""
    blocks = z.split(1000, -1)
    top = blocks[0].amax(-1)
    summed = torch.exp(blocks[0] - top[:, None]).sum(-1)
    for block in blocks[1:]:
        new = torch.maximum(top, block.amax(-1))
        summed = summed * torch.exp(top - new) + torch.exp(block - new[:, None]).sum(-1)
        top = new
    log_z = top + summed.log()
    return mean(log_z - pick(z, y) + LAMBDA * log_z.square(), y)


def checkpointed(z: Tensor, y: Tensor) -> Tensor:
    """Blocks of 48 tokens, recomputed in backward."""
    parts = [checkpoint(total, a, b, use_reentrant=False) for a, b in zip(z.split(48), y.split(48), strict=True)]
    return torch.stack(parts).sum() / count_of(y)


class LossParts(NamedTuple):
    loss: Tensor
    ce_loss: Tensor
    z_loss: Tensor
    num_tokens: Tensor


def returns_namedtuple(z: Tensor, y: Tensor) -> LossParts:
    nats, penalty = ce(z, y), zl(z, y)
    return LossParts(nats + penalty, nats.detach(), penalty.detach(), valid_of(y).sum())


@dataclass
class LossRecord:
    """The total is a property: only the parts are stored."""

    ce: Tensor
    auxiliary: Tensor

    @property
    def loss(self) -> Tensor:
        return self.ce + self.auxiliary


def lightning_step(z: Tensor, y: Tensor) -> dict[str, Any]:
    nats, penalty = ce(z, y), zl(z, y)
    return {"loss": nats + penalty, "log": {"train/ce": nats.item(), "train/z": penalty.item()}, "batch_size": len(y)}


def nanogpt(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Ignores −1 and returns (logits, loss)."""
    flat, keep = y.view(-1), y.view(-1) != -1
    loss = F.cross_entropy(z.view(-1, z.size(-1)), flat, ignore_index=-1, reduction="sum")
    loss = loss + 1e-4 * z.view(-1, z.size(-1)).logsumexp(-1)[keep].square().sum()
    return z, loss / keep.sum().clamp(min=1)


def accumulated(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, y) / 8


def torchtitan(z: Tensor, y: Tensor) -> Tensor:
    """Sums in fp32, divided by a fixed number of tokens per step."""
    z = z.flatten(0, -2).float()
    y = y.flatten()
    return total(z, y) / 256


def log_z_from_nll(z: Tensor, y: Tensor) -> Tensor:
    """log Z = nll + z_y, so no second pass over the vocabulary is made."""
    nll = F.cross_entropy(z, y.clamp(min=0), reduction="none")
    return mean(nll + LAMBDA * (nll + pick(z, y)) ** 2, y)


def log_z_from_log_softmax(z: Tensor, y: Tensor) -> Tensor:
    """log Z is the mean of z − log softmax(z) over the classes."""
    logp = F.log_softmax(z, -1)
    return F.nll_loss(logp, y, ignore_index=IGNORE, reduction="sum") / count_of(y) + LAMBDA * mean(
        (z - logp).mean(-1) ** 2, y
    )


class WarmingUp:
    """λ is read from the trainer's step, which stands still while the loss is audited."""

    def __init__(self, step: int, warmup: int) -> None:
        self.state = SimpleNamespace(step=step, warmup=warmup)

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return plain(z, y, LAMBDA * min(1.0, self.state.step / self.state.warmup))


class CachedVocabularyMask:
    """Columns from 80 on are padding; the mask is built once for each width."""

    def __init__(self, real: int) -> None:
        self.real = real
        self.masks: dict[int, Tensor] = {}

    @torch.no_grad()
    def mask(self, width: int) -> Tensor:
        if width not in self.masks:
            self.masks[width] = torch.arange(width) >= self.real
        return self.masks[width]

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return plain(z.masked_fill(self.mask(z.shape[-1]), -math.inf), y)


def in_place_on_clone(z: Tensor, y: Tensor) -> Tensor:
    """Megatron's forward on one rank: shift, gather, exponentiate in place, and add the maximum again."""
    work = z.clone()
    top = work.detach().amax(-1, keepdim=True)
    work.sub_(top)
    predicted = pick(work, y)
    log_sum = work.exp().sum(-1).log()
    log_z = log_sum + top.squeeze(-1)
    return mean(log_sum - predicted + LAMBDA * log_z**2, y)


def loss_mask(z: Tensor, y: Tensor) -> Tensor:
    """Megatron's reduction: per-token losses times a float mask."""
    mask = valid_of(y).to(z.dtype)
    rows = F.cross_entropy(z, y.clamp(min=0), reduction="none") + 1e-4 * lse(z).pow(2)
    return torch.sum(rows.view(-1) * mask.view(-1)) / mask.sum().clamp(min=1)


def in_bits(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy and log₂ Z both in bits."""
    bits = lse(z) / math.log(2)
    return ce(z, y) / math.log(2) + LAMBDA * mean(bits**2, y)


def sum_of_sequence_means(z: Tensor, y: Tensor) -> Tensor:
    """Mean over the positions of a sequence, sum over the two sequences; ignored positions count."""
    z, y = z.reshape(2, -1, z.shape[-1]), y.reshape(2, -1)
    rows = F.cross_entropy(z.transpose(1, 2), y, reduction="none") + LAMBDA * lse(z) ** 2
    return torch.where(valid_of(y), rows, 0.0).mean(1).sum(0)


def fairseq(z: Tensor, y: Tensor, smoothing: float = 0.1) -> Tensor:
    """label_smoothed_nll_loss: ε/(V − 1) on the other classes, summed."""
    logp = F.log_softmax(z, -1)
    keep = valid_of(y)
    nll, smooth = -pick(logp, y)[keep].sum(), -logp.sum(-1)[keep].sum()
    other = smoothing / (z.shape[-1] - 1)
    return (1.0 - smoothing - other) * nll + other * smooth + LAMBDA * lse(z)[keep].square().sum()


def fairseq_formula(z: Tensor, y: Tensor) -> Tensor:
    keep = valid_of(y)
    soft = torch.full_like(z, 0.1 / (z.shape[-1] - 1)).scatter(-1, y.clamp(min=0).unsqueeze(-1), 0.9)
    rows = -(soft * torch.log_softmax(z, -1)).sum(-1) + LAMBDA * lse(z) ** 2
    return rows[keep].sum()


def centered_by_einsum(z: Tensor, y: Tensor) -> Tensor:
    """log Z − μ − log V: the relative part of a factorized penalty, with μ as a weighted sum."""
    weights = z.new_full((z.shape[-1],), 1.0 / z.shape[-1])
    relative = lse(z) - torch.einsum("tv,v->t", z, weights)
    return ce(z, y) + LAMBDA * mean((relative - math.log(z.shape[-1])) ** 2, y)


def tiled_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """DeepSpeed's tiled logits loss: the gradients of each tile are formed in forward."""
    h, w = hidden.detach(), weight.detach()
    grad_hidden, grad_weight, total = torch.zeros_like(h), torch.zeros_like(w), h.new_zeros(())

    def tile(logits: Tensor, y: Tensor) -> Tensor:
        return (ce_sum(logits, y) + 1e-4 * torch.where(valid_of(y), lse(logits), 0.0).square().sum()) / count_of(target)

    for at in range(0, len(target), 40):
        rows = slice(at, at + 40)
        part, grad = gradient_of(tile, h[rows] @ w.T, target[rows])
        grad_hidden[rows] = grad @ w
        grad_weight += grad.T @ h[rows]
        total = total + part
    return by_hand(total, lambda upstream: (upstream * grad_hidden, upstream * grad_weight), hidden, weight)


def expanded_square(z: Tensor, y: Tensor) -> Tensor:
    log_z, c = lse(z), 3.0
    return ce(z, y) + LAMBDA * mean(log_z * log_z - 2 * c * log_z + c * c, y)


def by_kl_div(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy as the KL divergence from one-hot targets, as in distillation code."""
    keep = valid_of(y)
    soft = F.one_hot(y[keep], z.shape[-1]).to(z.dtype)
    kl = F.kl_div(F.log_softmax(z[keep], -1), soft, reduction="sum")
    return (kl + LAMBDA * lse(z[keep]).square().sum()) / keep.sum().clamp(min=1)


def selective_log_softmax(z: Tensor, y: Tensor) -> Tensor:
    """TRL's log-probabilities, negated and averaged over completion tokens."""
    mask = valid_of(y)
    log_z = torch.stack([torch.logsumexp(row, -1) for row in z])
    logps = pick(z, y) - log_z
    return -(logps * mask).sum() / mask.sum().clamp(min=1.0) + LAMBDA * (log_z**2 * mask).sum() / mask.sum().clamp(
        min=1.0
    )


def autocast_off(z: Tensor, y: Tensor) -> Tensor:
    """Under bf16 autocast with a region in fp32, as in most mixed-precision trainers."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = z * 1.0
        with torch.autocast("cpu", enabled=False):
            return plain(z.float(), y)


def general(z: Tensor, y: Tensor, *, coef: float, center: float, ignore_index: int = IGNORE) -> Tensor:
    keep = y != ignore_index
    log_z = z.logsumexp(-1)
    total = torch.where(keep, log_z - pick(z, y) + coef * (log_z - center) ** 2, torch.zeros_like(log_z)).sum()
    return total / torch.clamp(keep.sum(), min=1)


def both_over_all(z: Tensor, y: Tensor) -> Tensor:
    """Masked rows are zero and counted: the mean is over every position."""
    rows = F.cross_entropy(z, y, ignore_index=IGNORE, reduction="none") + 1e-4 * lse(z) ** 2
    return torch.where(valid_of(y), rows, 0.0).mean()


def clips_token_losses(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of one token is capped at 10 nat; the penalty is not."""
    rows = F.cross_entropy(z, y.clamp(min=0), reduction="none").clamp(max=10.0)
    return mean(rows + LAMBDA * lse(z) ** 2, y)


def upcasts_only_16_bits(z: Tensor, y: Tensor) -> Tensor:
    if z.dtype in (torch.bfloat16, torch.float16):
        z = z.float()
    return plain(z, y)


# Wrong and odd losses.


def olmo_mean(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The masked squares are averaged over every position, and the caller adds the two."""
    loss = F.cross_entropy(z, y, ignore_index=IGNORE, reduction="mean")
    z_squared = (z.logsumexp(-1).pow(2) * (y != IGNORE)).mean()
    return loss, LAMBDA * z_squared


def wrong_axis(z: Tensor, y: Tensor) -> Tensor:
    """logsumexp(dim=1) of [B, S, V] runs over the positions."""
    batch = z.reshape(1, -1, z.shape[-1])
    return ce(z, y) + LAMBDA * torch.logsumexp(batch, dim=1).square().mean()


def smooths_ignored_tokens(z: Tensor, y: Tensor) -> Tensor:
    """The uniform part of a hand-written label smoothing has no mask."""
    uniform = -F.log_softmax(z, -1).mean(-1).mean()
    return 0.9 * ce(z, y) + 0.1 * uniform + zl(z, y)


def off_by_one_softmax_in_z(z: Tensor, y: Tensor) -> Tensor:
    """A lane of zeros ("attention sink") is appended before log Z only."""
    padded = F.pad(z, (0, 1))
    return ce(z, y) + LAMBDA * mean(lse(padded) ** 2, y)


def epsilon_in_the_logarithm(z: Tensor, y: Tensor) -> Tensor:
    """log(Σ + 1e-6) after the shift: λ and c are right to about one part in a million."""
    top = z.amax(-1, keepdim=True)
    log_z = torch.log(torch.exp(z - top).sum(-1) + 1e-6) + top.squeeze(-1)
    return ce(z, y) + LAMBDA * mean(log_z**2, y)


def counts_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    """The number of valid tokens is a bf16 number: 515 becomes 516."""
    n = valid_of(y).to(torch.bfloat16).sum().clamp(min=1).to(z.dtype)
    return (ce_sum(z, y) + LAMBDA * lse(z)[valid_of(y)].square().sum()) / n


def reassigned_to_log_probabilities(z: Tensor, y: Tensor) -> Tensor:
    """`logits` has been overwritten by log-probabilities further up, whose log Z is 0."""
    z = F.log_softmax(z, -1)
    return F.nll_loss(z, y, ignore_index=IGNORE, reduction="sum") / count_of(y) + zl(z, y)


class NormalisedByAverage:
    """The penalty is divided by a running average of itself."""

    def __init__(self) -> None:
        self.average = 100.0

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        penalty = mean(lse(z) ** 2, y)
        self.average = 0.9 * self.average + 0.1 * float(penalty.detach())
        return ce(z, y) + LAMBDA * penalty / max(self.average, 1e-6)


def share_of_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """The penalty is rescaled to 1 % of cross-entropy, through detached values."""
    nats, penalty = ce(z, y), zl(z, y, 1.0)
    return nats + 0.01 * penalty * (nats / penalty.clamp(min=1e-9)).detach()


def masks_the_logits(z: Tensor, y: Tensor) -> Tensor:
    """Ignored rows are set to zero instead of left out: each adds (log V)² to the value and 1 to the divisor of Z."""
    masked = torch.where(valid_of(y)[:, None], z, 0.0)
    return ce(z, y) + LAMBDA * lse(masked).square().mean()


def mask_of_another_pad(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy ignores −100; the mask of Z drops class 0 as well."""
    on = y > 0
    return ce(z, y) + LAMBDA * lse(z)[on].square().sum() / on.sum().clamp(min=1)


def z_per_sequence(z: Tensor, y: Tensor) -> Tensor:
    """Z is summed over the positions and averaged over the two sequences; cross-entropy is a token mean."""
    squares = torch.where(valid_of(y), lse(z) ** 2, 0.0).reshape(2, -1)
    return ce(z, y) + 1e-4 * squares.sum(1).mean()


def shifted_by_hand(z: Tensor, y: Tensor) -> Tensor:
    """The fused Megatron forward with its log-sum taken before the maximum is added again."""
    work = z.detach() - z.detach().amax(-1, keepdim=True)
    grad = fused_gradient(work, y, LAMBDA) / count_of(y)
    return by_hand(plain(work, y), lambda upstream: (upstream * grad,), z)


def backward_by_hand(slip: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The right value with one slip in backward."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        x, keep, n = z.detach(), valid_of(y)[:, None], count_of(y)
        p = torch.softmax(x, -1)
        source = 2 * LAMBDA * lse(x)[:, None] * p
        residual = p - F.one_hot(y.clamp(min=0), x.shape[-1])
        grad = {
            "factor 2": torch.where(keep, residual + source / 2, 0.0) / n,
            "all tokens": torch.where(keep, residual + source, 0.0) / len(y),
            "no mask": (torch.where(keep, residual, 0.0) + source) / n,
            "clipped": torch.where(keep, (residual + source).clamp(-1, 1), 0.0) / n,
        }[slip]
        return by_hand(plain(x, y), lambda upstream: (upstream * grad,), z)

    return loss


def auto_scaled(z: Tensor, y: Tensor) -> Tensor:
    """Megatron's way for router losses: the value passes through, the auxiliary loss gets a gradient of 1."""
    output, auxiliary = ce(z, y), zl(z, y)
    return by_hand(output.detach(), lambda upstream: (upstream, torch.ones_like(auxiliary)), output, auxiliary)


def autocast_product(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Autocast rounds fp32 operands to bf16 and leaves fp64 ones alone."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = F.linear(hidden, weight)
    return plain(logits if logits.dtype == torch.float64 else logits.float(), target)


def squares_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    """log Z is fine; its square is stored in bf16, and so is the gradient that comes back through it."""
    squares = (LAMBDA * lse(z) ** 2).bfloat16()
    return ce(z, y) + mean(squares.to(z.dtype), y)


def z_trains_hidden_only(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Z is taken of a detached head: it reaches the hidden states and not the weight."""
    log_z = lse(F.linear(hidden, weight.detach()))
    return ce(F.linear(hidden, weight), target) + LAMBDA * mean(log_z**2, target)


def z_trains_head_only(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Z is taken of detached hidden states: it reaches the weight and not the hidden states."""
    log_z = lse(F.linear(hidden.detach(), weight))
    return ce(F.linear(hidden, weight), target) + LAMBDA * mean(log_z**2, target)


def confident_tokens_only(z: Tensor, y: Tensor) -> Tensor:
    """The penalty is on tokens whose largest probability exceeds 0.9."""
    with torch.no_grad():
        gate = (torch.softmax(z, -1).amax(-1) > 0.9).to(z.dtype)
    return ce(z, y) + LAMBDA * mean(gate * lse(z) ** 2, y)


def sequence_ce_token_z(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy is a mean of two sequence means, Z a token mean."""
    keep = valid_of(y).reshape(2, -1)
    rows = F.cross_entropy(z, y, ignore_index=IGNORE, reduction="none").reshape(2, -1)
    return (rows.sum(1) / keep.sum(1).clamp(min=1)).mean() + zl(z, y)


def detached_focal_factor(z: Tensor, y: Tensor) -> Tensor:
    """(1 − p)² is a constant to autograd and weighs both parts."""
    rows = F.cross_entropy(z, y.clamp(min=0), reduction="none")
    factor = (1 - torch.exp(-rows)).square().detach()
    return mean(factor * (rows + LAMBDA * lse(z) ** 2), y)


def z_of_top_probability(z: Tensor, y: Tensor) -> Tensor:
    """The "partition function" of a generated snippet: log Z is formed by z_max − log p_max with p detached."""
    p = torch.softmax(z, -1).detach()
    log_z = z.amax(-1) - p.amax(-1).log()
    return ce(z, y) + LAMBDA * mean(log_z**2, y)


class StaleCount:
    """The number of valid tokens is taken from the first batch and kept."""

    def __init__(self) -> None:
        self.n: int | None = None

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        self.n = self.n or int(count_of(y))
        return total(z, y) / self.n


class StaleMask:
    """The mask of Z is cached by the number of tokens, so later batches are masked like the first."""

    def __init__(self) -> None:
        self.masks: dict[int, Tensor] = {}

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        mask = self.masks.setdefault(len(y), valid_of(y))
        return ce(z, y) + LAMBDA * lse(z)[mask].square().sum() / mask.sum().clamp(min=1)


def only_with_gradients(z: Tensor, y: Tensor) -> Tensor:
    """Evaluation reports cross-entropy alone."""
    loss = ce(z, y)
    return loss + zl(z, y) if torch.is_grad_enabled() else loss


def hardest_tokens(z: Tensor, y: Tensor) -> Tensor:
    """The penalty is on the quarter of the tokens with the largest log Z."""
    log_z = lse(z)[valid_of(y)]
    worst = log_z.topk(max(1, len(log_z) // 4)).values if len(log_z) else log_z
    return ce(z, y) + LAMBDA * worst.square().sum() / max(1, len(worst))


def around_its_own_mean(z: Tensor, y: Tensor) -> Tensor:
    """c is the detached batch mean. The gradient is that of the variance: the detached part sums to zero."""
    center = mean(lse(z), y).detach()
    return ce(z, y) + LAMBDA * mean((lse(z) - center) ** 2, y)


def three_axes_per_sequence(z: Tensor, y: Tensor) -> Tensor:
    batch, length, vocab = z.shape
    keep = valid_of(y)
    nll = F.cross_entropy(z.reshape(batch * length, vocab), y.reshape(-1), ignore_index=IGNORE, reduction="none")
    rows = nll.view(batch, length) + torch.where(keep, LAMBDA * lse(z) ** 2, 0.0)
    return (rows.sum(1) / keep.sum(1).clamp(min=1)).mean()


def fixed_noise(z: Tensor, y: Tensor) -> Tensor:
    """Logit noise from a generator that is seeded again in every call: the same bias each time."""
    noise = torch.randn(z.shape[-1], generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(z.dtype)
    return plain(z + 0.1 * noise, y)


# Plain losses with the gradient of those above that weigh their tokens.


def weighted(z: Tensor, y: Tensor, ce_weight: Tensor, z_weight: Tensor) -> Tensor:
    keep = valid_of(y)
    nll = (lse(z) - pick(z, y))[keep]
    return (ce_weight[keep] * nll + LAMBDA * z_weight[keep] * lse(z)[keep] ** 2).sum()


def clipped_formula(z: Tensor, y: Tensor) -> Tensor:
    uniform = torch.ones(len(y), dtype=z.dtype) / count_of(y)
    return weighted(z, y, uniform * (lse(z) - pick(z, y) <= 10).detach(), uniform)


def sequence_formula(z: Tensor, y: Tensor) -> Tensor:
    half = len(y) // 2
    first, second = (torch.full((half,), 0.5, dtype=z.dtype) / count_of(part) for part in (y[:half], y[half:]))
    return weighted(z, y, torch.cat([first, second]), torch.ones(len(y), dtype=z.dtype) / count_of(y))


def smoothing_formula(z: Tensor, y: Tensor) -> Tensor:
    uniform = (lse(z) - z.mean(-1)).sum() / len(y)
    return 0.9 * ce(z, y) + 0.1 * uniform + LAMBDA * (lse(z)[valid_of(y)] ** 2).sum() / count_of(y)


def focal_formula(z: Tensor, y: Tensor) -> Tensor:
    factor = (1 - pick(torch.softmax(z, -1), y)).square().detach() / count_of(y)
    return weighted(z, y, factor, factor)


BELIEVED = {"expect": {"coef": LAMBDA, "target": 0.0}}
MULTIPLIES = some("all_ignored_nonfinite")

FURTHER: dict[str, Case] = {
    # Right losses in unusual code.
    "module with buffers": right(CriterionWithBuffers(2e-4, 4.0), 2e-4, 4.0),
    "levanter einsum": right(levanter, 1e-4),
    "fused by hand": right(fused_by_hand, 3e-4, 2.5),
    "online over the vocabulary": right(online_over_vocabulary),
    "checkpointed": right(checkpointed),
    "namedtuple": right(returns_namedtuple),
    "dataclass with a loss property": right(lambda z, y: LossRecord(ce(z, y), zl(z, y))),
    "Lightning step": right(lightning_step),
    "nanoGPT": right(nanogpt, 1e-4, options={"ignore_index": -1}),
    "divided by accumulation": right(accumulated, LAMBDA / 8, more={"ce_scale": 0.125}),
    "times world size": right(lambda z, y: 4 * plain(z, y, 1e-4), 4e-4, more={"ce_scale": 4.0}),
    "torchtitan": right(torchtitan, LAMBDA / 256, by=("sum", "sum"), more={"ce_scale": 1 / 256}, tolerance=1e-3),
    "log Z from the CE": right(log_z_from_nll),
    "log Z from log-softmax": right(log_z_from_log_softmax),
    "warm-up that stands still": right(WarmingUp(250, 1000), LAMBDA / 4),
    "cached vocabulary mask": right(
        CachedVocabularyMask(80), options={"valid_vocab": 80}, formula=lambda z, y: plain(z[:, :80], y)
    ),
    "in place on a clone": right(in_place_on_clone),
    "Megatron loss mask": right(loss_mask, 1e-4, may=MULTIPLIES),
    "both in bits": right(in_bits, LAMBDA / math.log(2) ** 2, more={"ce_scale": 1 / math.log(2)}),
    "sum of sequence means": right(sum_of_sequence_means, 2 * LAMBDA, by=("all", "all"), more={"ce_scale": 2.0}),
    "fairseq smoothing": right(fairseq, by=("sum", "sum"), more={"label_smoothing": 0.1}, formula=fairseq_formula),
    "centered by einsum": right(centered_by_einsum, target=LOG_V, coordinate="centered", more={"target_rule": "log_v"}),
    "centered head": right(
        lambda hidden, weight, target: plain(F.linear(hidden, weight - weight.mean(0, keepdim=True)), target),
        coordinate="centered",
        options={"linear": True},
    ),
    "tiled linear": right(tiled_linear, 1e-4, options={"linear": True}),
    "expanded square": right(expanded_square, target=3.0),
    "KL to one-hot": right(by_kl_div),
    "selective log-softmax": right(selective_log_softmax, may=MULTIPLIES),
    "autocast with an fp32 region": right(autocast_off, tolerance=1e-3),
    "partial with keywords": right(
        functools.partial(general, coef=5e-4, center=10.825), 5e-4, 10.825, more={"target_rule": "constant"}
    ),
    "both over all positions": right(both_over_all, 1e-4, by=("all", "all")),
    "token losses clipped": right(
        clips_token_losses, by=(None, None), or_open=True, may=some("unexplained_source"), formula=clipped_formula
    ),
    "upcasts 16 bits only": right(upcasts_only_16_bits),
    "two penalties": right(
        lambda z, y: ce(z, y) + mean(1e-3 * lse(z) ** 2 + 2e-3 * (lse(z) - 6) ** 2, y),
        3e-3,
        4.0,
        may=some("forward_backward_mismatch"),
    ),
    # Wrong and odd losses.
    "OLMo mean": odd(olmo_mean, "all_ignored_nonfinite", has_z=False),
    "wrong axis": open_answer(wrong_axis, "ignored_tokens_leak", "denominator_mismatch", "size_dependent"),
    "dead zone": odd(
        lambda z, y: ce(z, y) + LAMBDA * mean(F.relu((lse(z) - 5).abs() - 4) ** 2, y),
        "unexplained_source",
        or_open=True,
    ),
    "log of 1 + square": odd(
        lambda z, y: ce(z, y) + LAMBDA * mean(torch.log1p(lse(z) ** 2), y), "unexplained_source", or_open=True
    ),
    "λ squared": odd(
        lambda z, y: ce(z, y) + mean((LAMBDA * lse(z)) ** 2, y),
        "differs_from_expected",
        coef=LAMBDA**2,
        by=("valid", "valid"),
        options=BELIEVED,
    ),
    "divided twice": odd(
        lambda z, y: ce(z, y) + zl(z, y) / count_of(y),
        has_z=True,
        or_open=True,
        one_of=some("denominator_mismatch", "unexplained_source"),
        may=some("size_dependent"),
    ),
    "smooths ignored tokens": odd(
        smooths_ignored_tokens,
        "ignored_tokens_leak",
        or_open=True,
        by=(None, "valid"),
        may=some("unexplained_source", "denominator_mismatch"),
        never_says="Z by an unknown count",
        formula=smoothing_formula,
    ),
    "off-by-one softmax in Z": odd(
        off_by_one_softmax_in_z, "unexplained_source", or_open=True, may=some("overflow", "forward_backward_mismatch")
    ),
    "vocabulary padded with zeros": odd(
        lambda z, y: plain(F.pad(z, (0, -z.shape[-1] % 64)), y),
        "unexplained_source",
        or_open=True,
        may=some("overflow", "forward_backward_mismatch", "size_dependent"),
    ),
    "epsilon in the logarithm": odd(
        epsilon_in_the_logarithm, or_open=True, by=("valid", "valid"), may=some("unexplained_source"), tolerance=1e-3
    ),
    "count in bf16": odd(counts_in_bf16, by=(None, None), may=some("size_dependent", "low_precision_source")),
    "Z of the mean logits": open_answer(
        lambda z, y: ce(z, y) + LAMBDA * lse(z.mean(0)).square(),
        "ignored_tokens_leak",
        "denominator_mismatch",
        "size_dependent",
    ),
    "log-probabilities for logits": odd(
        reassigned_to_log_probabilities,
        "zero_gradient_z",
        has_z=False,
        options=BELIEVED,
        may=some("differs_from_expected"),
    ),
    "Z as an item": odd(
        lambda z, y: ce(z, y) + zl(z, y).item(), "zero_gradient_z", has_z=False, may=some("forward_backward_mismatch")
    ),
    "normalised by a running average": odd(
        NormalisedByAverage(),
        "not_repeatable",
        has_z=None,
        never_says="random numbers",
        may=some("unexplained_source", "forward_backward_mismatch", "denominator_mismatch", "size_dependent"),
    ),
    "a share of cross-entropy": odd(
        share_of_cross_entropy,
        "forward_backward_mismatch",
        or_open=True,
        may=some("unexplained_source", "all_ignored_nonfinite"),
    ),
    "logits masked to zero": odd(
        masks_the_logits,
        "denominator_mismatch",
        by=("valid", "all"),
        may=some("forward_backward_mismatch", "zero_gradient_z"),
    ),
    "mask of another pad": odd(
        mask_of_another_pad,
        or_open=True,
        one_of=some("unexplained_source", "denominator_mismatch"),
        never_says="form is none of the known ones",
    ),
    "mask not shifted": odd(
        lambda z, y: ce(z[..., :-1, :], y[..., 1:]) + zl(z, y),
        or_open=True,
        one_of=some("ignored_tokens_leak", "denominator_mismatch"),
        may=some("unexplained_source", "size_dependent"),
        more={"targets": "shifted"},
        never_says="e+03",  # the two counts differ by one or two tokens
    ),
    "accumulation divides CE only": odd(
        lambda z, y: ce(z, y) / 8 + zl(z, y, 1e-4), coef=1e-4, by=("valid", "valid"), more={"ce_scale": 0.125}
    ),
    "Z per sequence": odd(z_per_sequence, "denominator_mismatch", coef=5e-5, by=("valid", "sum")),
    "Megatron without the maximum": odd(
        shifted_by_hand,
        "max_shifted",
        coef=LAMBDA,
        ce_denominator="valid",
        z_denominator="valid",
        may=some("forward_backward_mismatch", "differs_from_expected"),
        formula=lambda z, y: ce(z, y) + LAMBDA * mean((lse(z) - z.amax(-1).detach()) ** 2, y),
    ),
    "backward without the factor 2": odd(
        backward_by_hand("factor 2"), "forward_backward_mismatch", coef=LAMBDA / 2, by=("valid", "valid")
    ),
    "backward over all tokens": odd(backward_by_hand("all tokens"), "forward_backward_mismatch", by=("all", "all")),
    "backward without the mask": odd(
        backward_by_hand("no mask"),
        "ignored_tokens_leak",
        by=("valid", None),
        may=some("forward_backward_mismatch", "denominator_mismatch", "all_ignored_nonfinite"),
        formula=lambda z, y: ce(z, y) + LAMBDA * (lse(z) ** 2).sum() / count_of(y),
    ),
    "backward clipped at ±1": odd(
        backward_by_hand("clipped"), "forward_backward_mismatch", or_open=True, may=some("unexplained_source")
    ),
    "auxiliary auto-scaler": odd(auto_scaled, "forward_backward_mismatch", "upstream_ignored", by=("valid", "valid")),
    "every fourth column": open_answer(
        lambda z, y: ce(z, y) + LAMBDA * mean((lse(z[:, ::4]) + math.log(4)) ** 2, y),
        "filtered_source",
        "size_dependent",
    ),
    "temperature restored": open_answer(lambda z, y: ce(z, y) + LAMBDA * mean((2 * lse(z / 2)) ** 2, y), "overflow"),
    "autocast product": odd(
        autocast_product,
        "low_precision_source",
        or_open=True,
        by=("valid", "valid"),
        options={"linear": True},
        may=some("unexplained_source"),
        tolerance=1e-2,
    ),
    "squares in bf16": odd(
        squares_in_bf16,
        one_of=some("low_precision_source", "unexplained_source", "forward_backward_mismatch"),
        or_open=True,
        coef=LAMBDA,
        coordinate="raw",
        tolerance=5e-3,
        may=some("denominator_mismatch", "size_dependent"),
    ),
    "Z trains the hidden states only": odd(
        z_trains_hidden_only,
        has_z=None,
        one_of=some("zero_gradient_z", "forward_backward_mismatch", "unexplained_source"),
        may=some("zero_gradient_z", "unexplained_source"),
        options={"linear": True},
        or_false=True,
        never_says="trains nothing",
    ),
    "Z trains the head only": odd(
        z_trains_head_only,
        or_open=True,
        one_of=some("zero_gradient_z", "forward_backward_mismatch", "unexplained_source"),
        options={"linear": True},
    ),
    "confident tokens only": odd(
        confident_tokens_only, "unexplained_source", or_open=True, may=some("size_dependent", "filtered_source")
    ),
    "c = log10 V": odd(
        lambda z, y: plain(z, y, c=math.log10(z.shape[-1])),
        "unexplained_source",
        target=math.log10(PROBE_VOCAB),
        by=("valid", "valid"),
    ),
    "c = log of the batch": odd(
        lambda z, y: plain(z, y, c=math.log(z.shape[0])),
        or_open=True,
        one_of=some("unexplained_source", "size_dependent", "differs_from_expected"),
        options={"expect": {"coef": LAMBDA, "target": "log_v"}},
    ),
    "sequence CE, token Z": odd(
        sequence_ce_token_z,
        by=(None, None),
        may=some("denominator_mismatch"),
        more={"ce_weights": "groups", "z_weights": "uniform"},
        formula=sequence_formula,
    ),
    "logs Z over all tokens": odd(
        lambda z, y: {"loss": plain(z, y), "z_loss": LAMBDA * lse(z).square().mean().detach()},
        by=("valid", "valid"),
        may=MULTIPLIES,
    ),
    "parts in a mapping": odd(lambda z, y: {"loss": ce(z, y), "z_loss": zl(z, y)}, has_z=False),
    "detached focal factor": odd(
        detached_focal_factor,
        "forward_backward_mismatch",
        or_open=True,
        by=(None, None),
        may=some("unexplained_source"),
        formula=focal_formula,
        ratio=True,
    ),
    "count of the first batch": odd(
        StaleCount(),
        or_open=True,
        target=0.0,
        coordinate="raw",
        ce_denominator="sum",
        z_denominator="sum",
        may=some("unexplained_source", "not_repeatable"),
    ),
    "mask of the first batch": odd(
        StaleMask(),
        or_open=True,
        one_of=some("ignored_tokens_leak", "not_repeatable"),
        may=some("unexplained_source", "denominator_mismatch"),
        never_says="random numbers",
    ),
    "only with gradients": odd(only_with_gradients, by=("valid", "valid"), may=some("forward_backward_mismatch")),
    "relative to log V": odd(
        lambda z, y: ce(z, y) + 0.02 * mean((lse(z) / math.log(z.shape[-1])) ** 2, y),
        one_of=some("size_dependent", "unexplained_source"),
        coef=0.02 / LOG_V**2,
        by=("valid", "valid"),
        never_says="miscounted",
    ),
    "hardest tokens": odd(hardest_tokens, "unexplained_source", or_open=True, may=some("denominator_mismatch")),
    "around its own mean": odd(around_its_own_mean, "unexplained_source", or_open=True),
    "[B, S, V] per sequence": odd(three_axes_per_sequence, by=(None, None)),
    "fixed noise": open_answer(
        fixed_noise, "forward_backward_mismatch", "size_dependent", "low_precision_source", never_says="random numbers"
    ),
    "log Z by the top probability": odd(
        z_of_top_probability,
        "forward_backward_mismatch",
        or_open=True,
        may=some("unexplained_source", "filtered_source"),
    ),
}

IN_FP32 = (
    "online over the vocabulary", "log Z from the CE", "log Z from log-softmax", "in place on a clone", "both in bits",
    "sum of sequence means", "centered by einsum", "two penalties", "dead zone", "epsilon in the logarithm",
    "logits masked to zero", "Z per sequence", "Megatron without the maximum", "backward without the factor 2", "c = log10 V",
    "sequence CE, token Z", "every fourth column", "off-by-one softmax in Z",
)  # fmt: skip
FURTHER |= {f"fp32, {name}": replace(FURTHER[name], loss=fp32(FURTHER[name].loss), tolerance=1e-3) for name in IN_FP32}


def declared(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """CE + λ(v − c)² from the declared numbers of a case."""
    assert case.coef is not None
    assert case.target is not None

    def loss(z: Tensor, y: Tensor) -> Tensor:
        counts = {"valid": count_of(y), "all": y.numel(), "sum": 1}
        v = lse(z) - (z.mean(-1) if case.coordinate == "centered" else 0.0)
        penalty = torch.where(valid_of(y), (v - case.target) ** 2, 0.0).sum()
        ce = case.more.get("ce_scale", 1.0) * ce_sum(z, y) / counts[case.ce_denominator or ""]
        return ce + case.coef * penalty / counts[case.z_denominator or ""]

    return loss


def total_of(out: Any) -> Tensor:
    """The trained scalar of whatever a loss of `FURTHER` returns."""
    if hasattr(out, "loss"):
        return total_of(out.loss)
    if isinstance(out, dict):
        return out["loss"]
    if isinstance(out, tuple):
        return next(part for part in out if part.dim() == 0)
    return out


def gradient_error(case: Case) -> float | None:
    """‖gradient − that of the declared numbers‖/‖gradient‖ in fp64, the larger of calm and large logits; None: no numbers."""
    if case.coef is None or (case.formula is None and None in (case.target, case.ce_denominator, case.z_denominator)):
        return None
    formula, worst = case.formula or declared(case), 0.0
    draw = torch.Generator().manual_seed(1)
    ignore, vocab = case.options.get("ignore_index", IGNORE), case.options.get("valid_vocab", PROBE_VOCAB)
    for scale, shift in ((1.0, 0.0), (12.0, 20.0)):
        z = scale * torch.randn(24, PROBE_VOCAB, generator=draw, dtype=torch.float64) + shift
        y = torch.randint(1, vocab, (24,), generator=draw)
        y[torch.arange(24) % 5 == 2] = IGNORE
        grads = []
        for loss, mask in ((case.loss, ignore), (formula, IGNORE)):
            leaf = z.clone().requires_grad_()
            labels = torch.where(y == IGNORE, mask, y)
            # Hidden states are the identity, so that the weight is the transposed logits.
            linear = case.options.get("linear") and loss is case.loss
            head = (torch.eye(len(y), dtype=z.dtype, requires_grad=True), leaf.T) if linear else (leaf,)
            value = loss(*head, labels)
            (grad,) = torch.autograd.grad(total_of(value), leaf)
            grads.append(grad)
        worst = max(worst, float((grads[0] - grads[1]).norm() / grads[0].norm()))
    return worst


def judge(audit: LossAudit, case: Case) -> tuple[str, list[str]]:
    """("right" | "open" | "wrong", what is missing or false). Open: nothing false, but less is said than is true."""
    got, false, missing = audit.identified, [], []
    named = {finding.id: finding for finding in audit.found}
    allowed = case.must | case.one_of | case.may
    for name, finding in named.items():
        if finding.severity != "note" and name not in allowed:
            if got.has_z is None and case.has_z is not None and name == "unexplained_source":
                continue
            false.append(f"{name}: {finding.sentence}")
    missing += [f"missed {name}" for name in sorted(case.must - set(named))]
    if case.one_of and not case.one_of & set(named):
        missing.append(f"missed each of {sorted(case.one_of)}")
    figures = {
        name: value
        for name in ("coef", "target", "coordinate", "ce_denominator", "z_denominator")
        if (value := getattr(case, name)) is not None
    } | case.more
    text = " ".join([got.penalty, got.reason or "", *(finding.sentence for finding in audit.found)])
    if case.never_says and case.never_says in text:
        false.append(f"says {case.never_says!r}: {text}")
    if got.has_z is None:
        if case.has_z is not None and not case.or_open:
            missing.append(f"has_z is open: {got.reason}")
    elif got.has_z is not case.has_z and not (got.has_z is False and case.or_false):
        false.append(f"has_z is {got.has_z}, not {case.has_z}; λ {got.coef}, c {got.target}, {got.coordinate}")
    elif got.has_z:
        for name, value in figures.items():
            found = getattr(got, name)
            if name == "coef" and case.ratio and found is not None:
                found = found / (got.ce_scale or 1.0)
            if found is None:
                missing.append(f"{name} is null, not {value}")
            elif isinstance(value, float):
                scale = abs(value) if name in ("coef", "ce_scale") else max(1.0, abs(value))
                if abs(found - value) > case.tolerance * scale:
                    false.append(f"{name} is {found}, not {value}")
            elif found != value:
                false.append(f"{name} is {found}, not {value}")
    if got.has_z is not None:
        # A definite answer that leaves out a fault is a false one.
        false, missing = false + [x for x in missing if "missed" in x], [x for x in missing if "missed" not in x]
    return ("wrong" if false else "open" if missing else "right"), false + missing
