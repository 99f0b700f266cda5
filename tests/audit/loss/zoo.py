"""Unusual losses as they are found in repositories, each with the answer the audit owes.

`Answer.has_z` None means that the honest answer is "cannot be told"; `ids` are the findings that must be there, and no
other error may be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

import zloss

LAMBDA = 1e-3
IGNORE = -100


@dataclass(frozen=True)
class Answer:
    """What the audit must say."""

    has_z: bool | None
    coef: float | None = None
    target: float | None = None
    coordinate: str | None = None
    ids: frozenset[str] = frozenset()
    """Findings that must be named; other errors are wrong."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further attributes of `identified`."""
    words: str = ""
    """Part of `reason`, `penalty` or of a sentence."""


def exact(
    coef: float = LAMBDA, target: float | None = 0.0, coordinate: str = "raw", words: str = "", **more: Any
) -> Answer:
    return Answer(True, coef, target, coordinate, more=more, words=words)


def no_z(**more: Any) -> Answer:
    return Answer(False, more=more)


def found(*ids: str, has_z: bool | None = True, words: str = "", **more: Any) -> Answer:
    return Answer(has_z, ids=frozenset(ids), words=words, more=more)


def cannot_tell(words: str = "") -> Answer:
    return Answer(None, words=words, ids=frozenset({"unexplained_source"}))


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Any, backward: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.formula = backward
        return outputs.clone() if isinstance(outputs, Tensor) else outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.formula(*upstream))


def by_hand(outputs: Any, backward: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Any:
    """The outputs of a kernel; `backward` turns their upstream gradients into those of the inputs."""
    return _ByHand.apply(outputs, backward, *inputs)


def gradient_of(loss: Callable[..., Tensor], z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(value, gradient at the logits) of the sum of a loss, as a kernel forms them in its forward pass."""
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        value = loss(leaf, y)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), grad


def valid_of(y: Tensor, ignore: int = IGNORE) -> Tensor:
    return y != ignore


def count_of(y: Tensor, ignore: int = IGNORE) -> Tensor:
    return valid_of(y, ignore).sum().clamp(min=1)


def ce(z: Tensor, y: Tensor, ignore: int = IGNORE, **options: Any) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=ignore, reduction="sum", **options) / count_of(y, ignore)


def lse(z: Tensor) -> Tensor:
    return torch.logsumexp(z, -1)


def mean(rows: Tensor, y: Tensor, ignore: int = IGNORE) -> Tensor:
    return rows[valid_of(y, ignore)].sum() / count_of(y, ignore)


def zl(z: Tensor, y: Tensor, coef: float = LAMBDA, c: float = 0.0, ignore: int = IGNORE) -> Tensor:
    return coef * mean((lse(z) - c) ** 2, y, ignore)


def penalty(f: Callable[[Tensor], Tensor], coef: float = LAMBDA) -> Callable[[Tensor, Tensor], Tensor]:
    """CE plus λ·mean f(log Z)."""
    return lambda z, y: ce(z, y) + coef * mean(f(lse(z)), y)


def plain(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y)


# Ignored classes inside the vocabulary.


def ignoring(index: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: ce(z, y, index) + zl(z, y, ignore=index)


def ours_ignoring(index: int) -> Callable[[Tensor, Tensor], Any]:
    return lambda z, y: zloss.logits_loss(z, y, zloss.StandardZLoss(LAMBDA, 0.0), ignore_index=index)


def embedding_pad(z: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).to(z.dtype)
    rows = F.cross_entropy(z, y.clamp(min=0), reduction="none") + LAMBDA * lse(z) ** 2
    mask = mask * (y >= 0)
    return (rows * mask).sum() / mask.sum().clamp(min=1)


# Weights.


def class_weights(
    vocab: int = 96, *, shared: bool = False, normalised: bool = True
) -> Callable[[Tensor, Tensor], Tensor]:
    weight = 0.5 + torch.arange(vocab, dtype=torch.float64) / vocab

    def loss(z: Tensor, y: Tensor) -> Tensor:
        w = weight.to(z.dtype)
        valid = valid_of(y)
        total = w[y[valid]].sum() if normalised else valid.sum()
        rows = F.cross_entropy(z, y, weight=w, reduction="none")[valid]
        z_rows = (lse(z) ** 2)[valid]
        if shared:
            return (rows + LAMBDA * w[y[valid]] * z_rows).sum() / total.clamp(min=1e-9)
        return rows.sum() / total.clamp(min=1e-9) + LAMBDA * z_rows.sum() / valid.sum().clamp(min=1)

    return loss


def token_weights(z: Tensor, y: Tensor) -> Tensor:
    w = (0.25 + torch.arange(len(y), dtype=z.dtype) % 5) * valid_of(y)
    rows = F.cross_entropy(z, y, reduction="none") + LAMBDA * lse(z) ** 2
    return (w * torch.where(valid_of(y), rows, 0.0)).sum() / w.sum().clamp(min=1e-9)


def our_token_weights(z: Tensor, y: Tensor) -> Any:
    w = 0.25 + (torch.arange(len(y)) % 5).to(torch.float32)
    return zloss.logits_loss(z, y, zloss.StandardZLoss(LAMBDA, 0.0), token_weight=w)


def token_weights_on_ce_only(z: Tensor, y: Tensor) -> Tensor:
    w = (0.25 + torch.arange(len(y), dtype=z.dtype) % 5) * valid_of(y)
    rows = F.cross_entropy(z, y, reduction="none")
    return (w * rows).sum() / w.sum().clamp(min=1e-9) + zl(z, y)


def focal(gamma: float, coef: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        rows = F.cross_entropy(z, y, reduction="none")
        return mean((1 - torch.exp(-rows)) ** gamma * rows, y) + (zl(z, y, coef) if coef else 0.0)

    return loss


def poly(z: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(z, y, reduction="none")
    return mean(rows + 1.0 - torch.exp(-rows), y) + zl(z, y)


def chunk_means(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over chunks of the means of each."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        parts = [ce(a, b) + zl(a, b) for a, b in zip(z.split(size), y.split(size), strict=True)]
        counted = sum(int(bool(valid_of(b).any())) for b in y.split(size))
        return torch.stack(parts).sum() / max(counted, 1)

    return loss


def sequence_means(z: Tensor, y: Tensor) -> Tensor:
    """Two sequences, averaged one by one; the batch is folded from the rows."""
    z, y = z.reshape(2, -1, z.shape[-1]), y.reshape(2, -1)
    valid = valid_of(y)
    rows = F.cross_entropy(z.transpose(1, 2), y, reduction="none") + LAMBDA * lse(z) ** 2
    per = torch.where(valid, rows, 0.0).sum(1) / valid.sum(1).clamp(min=1)
    return per.mean()


# Targets.


def shifted(z: Tensor, y: Tensor) -> Tensor:
    """As Hugging Face models do."""
    z, y = z[..., :-1, :], y[..., 1:]
    return plain(z.reshape(-1, z.shape[-1]), y.reshape(-1))


def shifted_without_z(z: Tensor, y: Tensor) -> Tensor:
    return ce(z[:-1], y[1:])


def shifted_z_over_all_rows(z: Tensor, y: Tensor) -> Tensor:
    return ce(z[:-1], y[1:]) + LAMBDA * lse(z).square().mean()


def padded_shift(z: Tensor, y: Tensor) -> Tensor:
    """Newer Hugging Face models pad the labels and shift them, and leave the logits whole."""
    moved = F.pad(y, (0, 1), value=IGNORE)[..., 1:]
    return plain(z, moved)


def rolled(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, y.roll(-1))


def ignores_targets(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, z.argmax(-1)) + LAMBDA * lse(z).square().mean()


def only_penalty(z: Tensor, y: Tensor) -> Tensor:
    return zl(z, y)


# Logits before the softmax.


def capped_and_scaled(scale: float, cap: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: plain(cap * torch.tanh(scale * z / cap), y)


def clamped(low: float, high: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: plain(z.clamp(low, high), y)


def z_of_capped(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(30 * torch.tanh(z / 30), y)


def z_of_scaled(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z / 2, y)


def temperature(z: Tensor, y: Tensor) -> Tensor:
    return plain(z / 0.7, y)


# Denominators and targets c.


def z_over_root(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum() / count_of(y).sqrt()


def z_over_one_more(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum() / (valid_of(y).sum() + 1)


def both_over_one_more(z: Tensor, y: Tensor) -> Tensor:
    n = valid_of(y).sum() + 1
    rows = F.cross_entropy(z, y, reduction="sum") + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum()
    return rows / n


def log_v_less_one(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y, c=math.log(z.shape[-1]) - 1)


def root_of_v(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y, c=math.sqrt(z.shape[-1]) / 10)


# Label smoothing.


def t5x(z: Tensor, y: Tensor, smoothing: float = 0.1, coef: float = LAMBDA) -> Tensor:
    """Confidence 1 − ε on the target, ε/(V − 1) elsewhere; the entropy of that is taken off."""
    vocab, valid = z.shape[-1], valid_of(y)
    high, low = 1 - smoothing, smoothing / (vocab - 1)
    constant = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    soft = torch.full_like(z, low).scatter(-1, y.clamp(min=0).unsqueeze(-1), high)
    rows = -(soft * torch.log_softmax(z, -1)).sum(-1) - constant + coef * lse(z) ** 2
    return rows[valid].sum() / count_of(y)


def torch_smoothing(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1, reduction="sum") / count_of(y) + zl(z, y)


# Penalties of another form.


def batch_variance(z: Tensor, y: Tensor) -> Tensor:
    v = lse(z)[valid_of(y)]
    return ce(z, y) + LAMBDA * (v - v.mean()).square().sum() / count_of(y)


def clipped_sum(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y).clamp(max=0.5)


def root_of_the_mean(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * (zl(z, y, 1.0) + 1e-12).sqrt()


def scaled_by_the_loss(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + ce(z, y).detach() * zl(z, y)


def second_half_only(z: Tensor, y: Tensor) -> Tensor:
    """Prompt tokens are masked by position."""
    on = (torch.arange(len(y)) >= len(y) // 2) & valid_of(y)
    rows = F.cross_entropy(z, y, reduction="none") + LAMBDA * lse(z) ** 2
    return rows[on].sum() / on.sum().clamp(min=1)


def top_classes(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(lse(z.topk(20, -1).values) ** 2, y)


def next_class(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, torch.where(valid_of(y), (y + 1) % z.shape[-1], y))


class AsModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.criterion(z, y) + LAMBDA * lse(z)[y != 0].square().mean()


def three_axes(z: Tensor, y: Tensor) -> Tensor:
    """[B, T, V] only, shifted inside."""
    assert z.dim() == 3
    z, y = z[:, :-1].contiguous(), y[:, 1:].contiguous()
    return F.cross_entropy(z.view(-1, z.shape[-1]), y.view(-1)) + LAMBDA * lse(z)[y != IGNORE].square().mean()


def every_other(z: Tensor, y: Tensor) -> Tensor:
    on = (torch.arange(len(y)) % 2 == 0) & valid_of(y)
    return ce(z, y) + LAMBDA * lse(z)[on].square().sum() / on.sum().clamp(min=1)


def last_only(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * lse(z[-1]).square()


def random_half(z: Tensor, y: Tensor) -> Tensor:
    on = (torch.rand(len(y), generator=torch.Generator().manual_seed(3)) < 0.5) & valid_of(y)
    return ce(z, y) + LAMBDA * lse(z)[on].square().sum() / on.sum().clamp(min=1)


def wrong_predictions_only(z: Tensor, y: Tensor) -> Tensor:
    on = (z.argmax(-1) != y) & (y % 3 == 0)
    return ce(z, y) + LAMBDA * lse(z)[on].square().sum() / count_of(y)


def entropy_bonus(z: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(z, -1)
    return ce(z, y) + 0.01 * mean((p * torch.log_softmax(z, -1)).sum(-1), y)


def logit_norm(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(z.square().mean(-1), y)


# Returned values.


def returning(what: str) -> Callable[[Tensor, Tensor], Any]:
    def loss(z: Tensor, y: Tensor) -> Any:
        total, c, p = plain(z, y), ce(z, y), zl(z, y)
        accuracy = (z.argmax(-1) == y).double().mean()
        match what:
            case "total, ce, z":
                return total, c, p
            case "total, ce, z, detached":
                return total, c.detach(), p.detach()
            case "ce, z":
                return c, p
            case "ce, z without λ":
                return c, p / LAMBDA
            case "loss, logits":
                return total, z
            case "logits, loss":
                return z, total
            case "sum, n":
                return total * count_of(y), int(count_of(y))
            case "loss, n tensor":
                return total, count_of(y)
            case "loss, accuracy":
                return total, accuracy
            case "loss, float metrics":
                return total, {"ce": float(c), "z_loss": float(p), "accuracy": float(accuracy)}
            case "loss, z without λ":
                return total, (p / LAMBDA).detach()
            case "loss, mean log Z":
                return total, lse(z).mean().detach()
            case "dict":
                return {"loss": total, "ce_loss": c, "z_loss": p}
            case "dict of total":
                return {"ce": c.detach(), "z": p.detach(), "total_loss": total}
            case "model output":
                return SimpleNamespace(loss=total, logits=z, past_key_values=None)
            case "loss, None":
                return total, None
            case "list":
                return [total, p.detach()]
            case "ce without z, logits":
                return c, z
        raise AssertionError(what)

    return loss


def reports_z_of_all_layers(z: Tensor, y: Tensor) -> Any:
    return plain(z, y), 16 * zl(z, y).detach()


def calls_something_else_z(z: Tensor, y: Tensor) -> Any:
    return {"loss": plain(z, y), "z_loss": z.square().mean().detach()}


# Precision, graphs, state.


def bf16_inside(z: Tensor, y: Tensor) -> Tensor:
    return plain(z.bfloat16(), y).float()


def fp16_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return ce(z.half().float(), y) + zl(z, y)


def z_under_no_grad(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        extra = zl(z, y)
    return ce(z, y) + extra


class Schedule:
    """λ that grows slowly with every call, as a warm-up does."""

    def __init__(self, rate: float) -> None:
        self.step, self.rate = 0, rate

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        return ce(z, y) + zl(z, y, LAMBDA * (1 + self.rate * self.step))


def scaled_by_a_hook(z: Tensor, y: Tensor) -> Tensor:
    z = z * 1.0
    z.register_hook(lambda grad: 8.0 * grad)
    return plain(z, y)


def in_place(z: Tensor, y: Tensor) -> Tensor:
    z.mul_(1.0).add_(0.5)
    return plain(z, y)


# Sizes.


def wants_vocabulary(vocab: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert z.shape[-1] == vocab
        return plain(z, y)

    return loss


def wants_multiple(of: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        if z.shape[0] % of:
            raise ValueError(f"the number of tokens must be a multiple of {of}")
        return plain(z, y)

    return loss


def drops_last_tokens(block: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows beyond the last whole block are left out, once there is more than one block."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        whole = len(y) // block * block or len(y)
        return plain(z[:whole], y[:whole])

    return loss


def counts_at_most(limit: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Z is divided by a count that saturates."""
    return lambda z, y: ce(z, y) + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum() / count_of(y).clamp(max=limit)


def tail_missing_in_z(block: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Columns beyond the last whole block are missing from log Z of the penalty."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        whole = z.shape[-1] // block * block or z.shape[-1]
        return ce(z, y) + zl(z[:, :whole], y)

    return loss


def beyond_16_bits(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z[:, :65536], y)


def chunked(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A right chunked loss: sums, divided once."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        total = z.new_zeros(())
        for a, b in zip(z.split(size), y.split(size), strict=True):
            valid = valid_of(b)
            total = total + F.cross_entropy(a, b, reduction="sum") + LAMBDA * (lse(a) ** 2)[valid].sum()
        return total / count_of(y)

    return loss


def bf16_then_fp32(z: Tensor, y: Tensor) -> Tensor:
    """Logits stored in bf16, then everything in fp32."""
    return plain(z.bfloat16().float(), y)


def smoothing_and_log_v(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y, label_smoothing=0.1) + zl(z, y, c=math.log(z.shape[-1]))


def four_chunks(z: Tensor, y: Tensor) -> Tensor:
    """A mean of means over a fixed number of chunks, whatever their size."""
    parts = [plain(rows, targets) for rows, targets in zip(z.chunk(4), y.chunk(4), strict=True)]
    return torch.stack(parts).mean()


def ce_over_all_z_over_valid(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum", ignore_index=IGNORE) / y.numel() + zl(z, y)


def z_of_detached_logits(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z.detach(), y)


def wrong_sign(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) - zl(z, y)


def temperature_in_ce_only(z: Tensor, y: Tensor) -> Tensor:
    return ce(z / 2.0, y) + zl(z, y)


def z_without_the_target(z: Tensor, y: Tensor) -> Tensor:
    """The penalty is on the log-sum-exp of the other classes: nearly log Z wherever the target is unlikely."""
    keep = valid_of(y)
    others = torch.where(keep.unsqueeze(-1) & (torch.arange(z.shape[-1]) == y.unsqueeze(-1)), -torch.inf, z)
    return ce(z, y) + LAMBDA * mean(lse(others).square(), y)


def shifted_by_the_maximum(z: Tensor, y: Tensor) -> Tensor:
    return plain(z - z.amax(-1, keepdim=True), y)


def shifted_by_a_detached_maximum(z: Tensor, y: Tensor) -> Tensor:
    return plain(z - z.amax(-1, keepdim=True).detach(), y)


def fp32(loss: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    """The same loss on logits cast to fp32, as most code has it."""
    return lambda z, y: loss(z.float(), y)


# Reported values that differ from the trained ones only where tokens are ignored.


def reports_z_over_all_tokens(z: Tensor, y: Tensor) -> Any:
    return plain(z, y), LAMBDA * lse(z).square().mean().detach()


def reports_ce_over_all_tokens(z: Tensor, y: Tensor) -> Any:
    return {"loss": plain(z, y), "ce": (ce(z, y) * count_of(y) / y.numel()).detach(), "z_loss": zl(z, y).detach()}


# One class apart from all others.


def one_class_weighted(
    index: int, weight: float, *, shared: bool = False, normalised: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    """The CE of one class weighs `weight` times that of the others."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        w = torch.where(y == index, weight, 1.0).to(z.dtype) * valid_of(y)
        n = w.sum().clamp(min=1e-9) if normalised else count_of(y)
        rows = F.cross_entropy(z, y, reduction="none")
        if shared:
            return (w * (rows + LAMBDA * lse(z) ** 2)).sum() / n
        return (w * rows).sum() / n + zl(z, y)

    return loss


def no_z_for_class(index: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Tokens whose target is one class, say the end of a text, have no Z."""
    return lambda z, y: ce(z, y) + LAMBDA * (lse(z) ** 2)[valid_of(y) & (y != index)].sum() / count_of(y)


# Losses of (hidden, weight, target).


def head(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(h @ w.T, y)


def over_root_of_width(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(h @ w.T / math.sqrt(h.shape[-1]), y)


def over_width(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(h @ w.T / h.shape[-1], y)


def rms_norm_inside(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) @ w.T, y)


def cosine_head(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(16.0 * F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T, y)


def hidden_normalised(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(F.normalize(h, dim=-1) @ w.T, y)


def layer_norm_inside(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return plain(F.layer_norm(h, h.shape[-1:]) @ w.T, y)


def weight_transposed(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """The weight is [D, V], as in GPT-2's Conv1D and in JAX."""
    return plain(h @ w, y)


# Two penalties.


def raw_and_centered(z: Tensor, y: Tensor) -> Tensor:
    v = lse(z)
    return ce(z, y) + mean(LAMBDA * v**2 + 3 * LAMBDA * (v - z.mean(-1)) ** 2, y)


# What depends on the dtype of the logits.


def z_of_fp16_logits(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z.half().to(z.dtype), y)


def no_z_in_16_bits(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) if z.dtype in (torch.bfloat16, torch.float16) else plain(z, y)


def no_z_in_fp16(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) if z.dtype == torch.float16 else plain(z, y)


def upcast(z: Tensor, y: Tensor) -> Tensor:
    """Right in every dtype: 16-bit logits are widened first."""
    return plain(z if z.dtype == torch.float64 else z.float(), y)


class _InPlaceCrossEntropy(torch.autograd.Function):
    """As Megatron's `vocab_parallel_cross_entropy`: the maximum is taken off in place, and exp overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        top = logits.max(-1).values
        logits -= top.unsqueeze(-1)
        rows, safe = torch.arange(len(target)), target.clamp(min=0)
        predicted = logits[rows, safe].clone()
        exp = torch.exp(logits, out=logits)
        total = exp.sum(-1)
        log_z = total.log() + top
        exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exp.clone(), log_z, safe, target != IGNORE)
        return torch.where(target != IGNORE, log_z - top - predicted + LAMBDA * log_z**2, torch.zeros_like(log_z))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        p, log_z, safe, valid = ctx.saved_tensors
        grad = (1 + 2 * LAMBDA * log_z).unsqueeze(-1) * p
        grad[torch.arange(len(safe)), safe] -= 1
        return grad * (upstream * valid).unsqueeze(-1), None


def in_place_in_fp32(z: Tensor, y: Tensor) -> Tensor:
    """`float()` copies 64 and 16 bits, and hands fp32 through."""
    return _InPlaceCrossEntropy.apply(z.float(), y).sum() / count_of(y)


def in_place_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    loss = plain(z * 1.0, y)
    if z.dtype == torch.bfloat16:
        with torch.no_grad():
            z.sub_(1.0)
    return loss


# State, chance and selection.


class EveryNthCall:
    """Z on every n-th call only, as "every k steps" is often written."""

    def __init__(self, n: int) -> None:
        self.n, self.step = n, 0

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        self.step += 1
        return plain(z, y) if self.step % self.n == 0 else ce(z, y)


def python_random(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y, LAMBDA * random.random())


def python_random_half(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, y) if random.random() < 0.5 else ce(z, y)


def python_random_tokens(z: Tensor, y: Tensor) -> Tensor:
    on = torch.tensor([random.random() < 0.9 for _ in range(len(y))]) & valid_of(y)
    return ce(z, y) + LAMBDA * lse(z)[on].square().sum() / count_of(y)


def numpy_random(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + zl(z, y, LAMBDA * float(numpy.random.rand()))  # noqa: NPY002


class CountCachedByShape:
    """The count of valid tokens is looked up by the shape of the batch: right until a mask changes."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        n = self.counts.setdefault(tuple(z.shape), count_of(y))
        rows = F.cross_entropy(z, y, reduction="sum") + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum()
        return rows / n


def hardest(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """CE on the tokens with the largest losses; Z on all of them."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        rows = F.cross_entropy(z, y, reduction="none")[valid_of(y)]
        k = max(int(share * len(rows)), 1)
        return rows.topk(min(k, len(rows))).values.sum() / k + zl(z, y)

    return loss


def hardest_without_z(z: Tensor, y: Tensor) -> Tensor:
    rows = F.cross_entropy(z, y, reduction="none")
    return rows.topk(max(int(0.6 * len(rows)), 1)).values.mean()


def hardest_with_z(z: Tensor, y: Tensor) -> Tensor:
    """The hardest 60 % by CE plus Z, which both train on those tokens only."""
    rows = F.cross_entropy(z, y, reduction="none") + LAMBDA * torch.where(valid_of(y), lse(z), 0.0) ** 2
    return rows.topk(max(int(0.6 * len(rows)), 1)).values.mean()


def rolled_mask(z: Tensor, y: Tensor) -> Tensor:
    """The mask is that of the next row, for CE and Z alike."""
    on = valid_of(y).roll(1)
    rows = F.cross_entropy(z, y.clamp(min=0), reduction="none") + LAMBDA * lse(z) ** 2
    return rows[on].sum() / on.sum().clamp(min=1)


def rolled_mask_in_z(z: Tensor, y: Tensor) -> Tensor:
    on = valid_of(y).roll(1)
    return ce(z, y) + LAMBDA * (lse(z) ** 2)[on].sum() / on.sum().clamp(min=1)


# Denominators in few bits.


def count_rounded_to(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """The count of valid tokens in a narrow format: exact up to 256 in bf16, 2048 in fp16, 2^24 in fp32."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        n = count_of(y).to(dtype).to(z.dtype)
        return (F.cross_entropy(z, y, reduction="sum") + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum()) / n

    return loss


def z_count_rounded_to(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: ce(z, y) + LAMBDA * (lse(z) ** 2)[valid_of(y)].sum() / count_of(y).to(dtype).to(z.dtype)


# A function without targets.


def router_z_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Megatron's `z_loss_func` with its coefficient bound, as a user passes it to the audit."""
    return LAMBDA * torch.logsumexp(logits, dim=-1).square().mean()


LOG_V = math.log(96)

ZOO: dict[str, tuple[Callable[..., Any], dict[str, Any], Answer]] = {
    # 1: ignored classes
    "ignore_index 0": (ignoring(0), {"ignore_index": 0}, exact()),
    "ignore_index 1": (ignoring(1), {"ignore_index": 1}, exact()),
    "ignore_index 95": (ignoring(95), {"ignore_index": 95}, exact()),
    "ignore_index 50256": (ignoring(50256), {"ignore_index": 50256}, exact()),
    "ours, ignore_index 0": (ours_ignoring(0), {"ignore_index": 0}, exact()),
    "ours, ignore_index 50256": (ours_ignoring(50256), {"ignore_index": 50256}, exact()),
    "pad 0, not told": (embedding_pad, {}, exact()),
    # 2: squares and other forms
    "missing square": (penalty(lambda v: v), {}, found("not_squared", coef=LAMBDA)),
    "absolute": (penalty(torch.abs), {}, found("unexplained_source", words="|log Z − c|", coef=LAMBDA)),
    "cube": (penalty(lambda v: v.abs() ** 3), {}, found("unexplained_source", words="power 3", coef=LAMBDA)),
    "power 1.5": (penalty(lambda v: v.abs() ** 1.5), {}, found("unexplained_source", words="power 1.5", coef=LAMBDA)),
    "one-sided": (
        penalty(lambda v: F.relu(v - 7.3) ** 2),
        {},
        found("unexplained_source", words="one-sided", coef=LAMBDA, target=7.3),
    ),
    "one-sided below": (
        penalty(lambda v: F.relu(7.3 - v) ** 2),
        {},
        found("unexplained_source", words="one-sided", coef=LAMBDA, target=7.3),
    ),
    "Huber": (
        penalty(lambda v: 2 * F.huber_loss(v, torch.full_like(v, 3.0), delta=10.0, reduction="none")),
        {},
        found("unexplained_source", words="Huber", coef=LAMBDA, target=3.0, extra={"width": 10.0}),
    ),
    "smooth L1": (
        penalty(lambda v: F.smooth_l1_loss(v, torch.zeros_like(v), reduction="none")),
        {},
        found("unexplained_source", words="log Z"),
    ),
    "log cosh": (penalty(lambda v: torch.log(torch.cosh(v / 8))), {}, found("unexplained_source", words="log Z")),
    "variance": (batch_variance, {}, found("unexplained_source", words="variance", coef=LAMBDA)),
    # 3: where the fit failed
    "class weights": (class_weights(), {}, exact(ce_weights="class", z_weights="uniform")),
    "class weights of 1000 classes": (class_weights(1000), {}, exact(ce_weights="class")),
    "class weights, shared": (class_weights(shared=True), {}, exact(ce_weights="class", z_weights="shared")),
    "class weights over n": (class_weights(normalised=False), {}, exact(ce_weights="class")),
    "token weights": (token_weights, {}, exact(ce_weights="position", z_weights="shared")),
    "our token weights": (our_token_weights, {}, exact(ce_weights="position", z_weights="shared")),
    "token weights on CE": (token_weights_on_ce_only, {}, exact(ce_weights="position", z_weights="uniform")),
    "focal": (focal(2.0), {}, no_z(ce_weights="token")),
    "focal with Z": (focal(2.0, LAMBDA), {}, exact(ce_weights="token")),
    "poly loss with Z": (poly, {}, exact(ce_weights="token")),
    "shifted": (shifted, {}, exact(targets="shifted")),
    "shifted by padding": (padded_shift, {}, exact(targets="shifted")),
    "shifted, no Z": (shifted_without_z, {}, no_z(targets="shifted")),
    "shifted, Z over all rows": (
        shifted_z_over_all_rows,
        {},
        found("ignored_tokens_leak", "denominator_mismatch", targets="shifted", coef=LAMBDA),
    ),
    "rolled": (rolled, {}, found("targets_moved", targets="rolled", coef=LAMBDA)),
    "targets ignored": (ignores_targets, {}, found("unexplained_source", "ignored_tokens_leak", has_z=None)),
    "only the penalty": (only_penalty, {}, exact(ce_denominator="none")),
    "scale and softcap": (
        capped_and_scaled(0.5, 20.0),
        {},
        exact(extra={"logit_scale": 0.5, "softcap": 20.0}),
    ),
    "scale and softcap, other": (
        capped_and_scaled(1.7, 50.0),
        {},
        exact(extra={"logit_scale": 1.7, "softcap": 50.0}),
    ),
    "temperature": (temperature, {}, exact(extra={"logit_scale": 1 / 0.7})),
    "Z of capped logits": (z_of_capped, {}, cannot_tell()),
    "Z of scaled logits": (z_of_scaled, {}, cannot_tell()),
    "every other token": (
        every_other,
        {},
        found("unexplained_source", words="32 of 64 tokens only (row 0, 2, 4, 6, …)"),
    ),
    "last token only": (
        last_only,
        {},
        found("unexplained_source", "ignored_tokens_leak", words="1 of 64 tokens only (row 63)"),
    ),
    "random tokens": (random_half, {}, found("unexplained_source", words="of 64 tokens")),
    "tokens by target": (wrong_predictions_only, {}, found("unexplained_source", words="some tokens only")),
    "entropy bonus": (entropy_bonus, {}, cannot_tell()),
    "sum of Z clipped": (clipped_sum, {}, cannot_tell("calm logits")),
    "root of the mean": (root_of_the_mean, {}, found("unexplained_source", words="from batch to batch")),
    "scaled by the loss": (
        scaled_by_the_loss,
        {},
        found("unexplained_source", "forward_backward_mismatch", words="from batch to batch"),
    ),
    "second half only": (second_half_only, {}, exact(ce_weights="position", z_weights="shared")),
    "top classes in log Z": (top_classes, {}, cannot_tell()),
    "targets plus one": (next_class, {}, cannot_tell()),
    "a module with pad 0": (AsModule(), {"ignore_index": 0}, exact()),
    "three axes, shifted": (three_axes, {}, exact(targets="shifted")),
    "a constant divisor": (
        lambda z, y: plain(z, y) * count_of(y) / 1000,
        {},
        exact(1e-6, ce_denominator="sum", z_denominator="sum", ce_scale=1e-3),
    ),
    "CE in bits": (lambda z, y: ce(z, y) / math.log(2) + zl(z, y), {}, exact(ce_scale=1 / math.log(2))),
    "mean square of the logits": (logit_norm, {}, cannot_tell()),
    # 4: never called a tail
    "c = log V − 1": (log_v_less_one, {}, exact(target=LOG_V - 1, target_rule="log_v")),
    "c = √V/10": (root_of_v, {}, found("unexplained_source", words="c changes with the vocabulary")),
    "Z/√N": (z_over_root, {}, found("denominator_mismatch", coef=LAMBDA, z_denominator="sqrt_valid")),
    "Z/(N + 1)": (z_over_one_more, {}, found("denominator_mismatch", coef=LAMBDA, z_denominator="valid+1")),
    "both over N + 1": (both_over_one_more, {}, exact(ce_denominator="valid+1", z_denominator="valid+1")),
    "t5x smoothing": (t5x, {}, exact(label_smoothing=0.1)),
    "t5x smoothing, no Z": (lambda z, y: t5x(z, y, coef=0.0), {}, no_z(label_smoothing=0.1)),
    "torch smoothing": (torch_smoothing, {}, exact(label_smoothing=0.1)),
    # 5: returned values
    **{
        f"returns {what}": (returning(what), {}, exact())
        for what in (
            "total, ce, z",
            "total, ce, z, detached",
            "loss, logits",
            "logits, loss",
            "loss, n tensor",
            "loss, accuracy",
            "loss, float metrics",
            "loss, z without λ",
            "loss, mean log Z",
            "dict",
            "dict of total",
            "model output",
            "loss, None",
            "list",
        )
    },
    "returns sum, n": (returning("sum, n"), {}, exact(ce_denominator="sum", z_denominator="sum")),
    "returns ce, z": (returning("ce, z"), {}, found("returned_values", coef=LAMBDA)),
    "returns ce, z without λ": (returning("ce, z without λ"), {}, found("returned_values", coef=1.0)),
    "returns ce without z, logits": (returning("ce without z, logits"), {}, no_z()),
    "reports 16 times Z": (reports_z_of_all_layers, {}, found("reported_z_value", words="16 times")),
    "calls something else z": (calls_something_else_z, {}, found("reported_z_value", words="nor a multiple")),
    # 6: kinks
    "clamped ±50": (clamped(-50.0, 50.0), {}, exact(extra={"clamp_low": -50.0, "clamp_high": 50.0})),
    "clamped above 30.5": (clamped(-math.inf, 30.5), {}, exact(extra={"clamp_high": 30.5})),
    "clamped ±100": (clamped(-100.0, 100.0), {}, exact(extra={"clamp_low": -100.0, "clamp_high": 100.0})),
    # 7: means of means
    "means of chunks": (chunk_means(16), {}, exact(ce_weights="groups", z_weights="shared")),
    "means of sequences": (sequence_means, {}, exact(ce_weights="groups", z_weights="shared")),
    # 8: reach
    "wants V = 50257": (wants_vocabulary(50257), {}, exact()),
    "wants V = 211": (wants_vocabulary(211), {}, exact()),
    "wants multiples of 128": (wants_multiple(128), {}, exact()),
    "wants multiples of 48": (wants_multiple(48), {}, exact()),
    "drops tokens beyond blocks of 128": (drops_last_tokens(128), {}, found("size_dependent", words="T = 130")),
    "drops tokens beyond blocks of 512": (drops_last_tokens(512), {}, found("size_dependent", words="no gradient")),
    "counts at most 256": (counts_at_most(256), {}, found("size_dependent", words="λ")),
    "tail of 4096 missing": (tail_missing_in_z(4096), {}, found("size_dependent", words="V = 5,000: ")),
    "tail of 65536 missing": (
        tail_missing_in_z(65536),
        {},
        found("size_dependent", words="from 65,536 on are miscounted"),
    ),
    "beyond 65536": (beyond_16_bits, {}, found("size_dependent", words="V = 70,001")),
    "chunked, right": (chunked(100), {}, exact()),
    # the same in fp32, where rounding must not be read as structure
    "fp32, ignore_index 0": (fp32(ignoring(0)), {"ignore_index": 0}, exact()),
    "fp32, missing square": (fp32(penalty(lambda v: v)), {}, found("not_squared", coef=LAMBDA)),
    "fp32, one-sided": (
        fp32(penalty(lambda v: F.relu(v - 7.3) ** 2)),
        {},
        found("unexplained_source", words="one-sided", coef=LAMBDA),
    ),
    "fp32, class weights": (fp32(class_weights()), {}, exact(ce_weights="class", target=None)),
    "fp32, token weights": (fp32(token_weights), {}, exact(ce_weights="position", z_weights="shared", target=None)),
    "fp32, focal": (fp32(focal(2.0)), {}, no_z(ce_weights="token")),
    "fp32, shifted": (fp32(shifted), {}, exact(targets="shifted")),
    "fp32, clamped ±50": (fp32(clamped(-50.0, 50.0)), {}, exact()),
    "fp32, softcap": (fp32(capped_and_scaled(1.0, 30.0)), {}, exact(extra={"softcap": 30.0}, target=None)),
    "fp32, scale and softcap": (fp32(capped_and_scaled(0.5, 30.0)), {}, exact(target=None)),
    "fp32, t5x smoothing": (fp32(t5x), {}, exact(label_smoothing=0.1, target=None)),
    "fp32, means of chunks": (fp32(chunk_means(16)), {}, exact(ce_weights="groups", z_weights="shared")),
    "fp32, every other token": (
        fp32(every_other),
        {},
        found("unexplained_source", words="32 of 64 tokens only (row 0, 2, 4, 6, …)"),
    ),
    "fp32, tail of 4096 missing": (fp32(tail_missing_in_z(4096)), {}, found("size_dependent", words="from 4,096 on")),
    "fp32, λ = 1e-6, c = log V": (
        fp32(lambda z, y: ce(z, y) + zl(z, y, 1e-6, math.log(z.shape[-1]))),
        {},
        exact(1e-6, target=LOG_V, target_rule="log_v"),
    ),
    # precision, graphs, state
    "bf16 inside": (bf16_inside, {}, found("low_precision_source", coordinate="raw")),
    "fp16 logits in CE": (fp16_cross_entropy, {}, found("low_precision_source")),
    "Z under no_grad": (z_under_no_grad, {}, found("zero_gradient_z", "forward_backward_mismatch", has_z=False)),
    "schedule": (Schedule(0.05), {}, Answer(None, ids=frozenset({"not_repeatable"}))),
    "slow schedule": (Schedule(1e-4), {}, Answer(None, ids=frozenset({"not_repeatable"}))),
    "gradient scaled by a hook": (scaled_by_a_hook, {}, found("forward_backward_mismatch")),
    "in place": (in_place, {}, found("overwrites_input")),
    # variants people write
    "fp32 of bf16 logits": (bf16_then_fp32, {}, found("low_precision_source", coordinate="raw")),
    "fp32 of the given logits": (fp32(plain), {}, exact()),
    "label smoothing, c = log V": (
        smoothing_and_log_v,
        {},
        exact(target=LOG_V, target_rule="log_v", label_smoothing=0.1),
    ),
    "mean of four chunks": (four_chunks, {}, exact(ce_weights="groups", z_weights="shared")),
    "CE over all, Z over valid": (ce_over_all_z_over_valid, {}, found("denominator_mismatch", coef=LAMBDA)),
    "Z of detached logits": (
        z_of_detached_logits,
        {},
        found("zero_gradient_z", "forward_backward_mismatch", has_z=False),
    ),
    "wrong sign": (wrong_sign, {}, found("negative_coefficient", coef=-LAMBDA, target_rule="constant")),
    "Z of the other classes": (z_without_the_target, {}, cannot_tell("depends on the target")),
    "temperature in CE only": (temperature_in_ce_only, {}, cannot_tell()),
    "shifted by the maximum": (shifted_by_the_maximum, {}, found("max_shifted", coef=LAMBDA)),
    "shifted by a detached maximum": (
        shifted_by_a_detached_maximum,
        {},
        found("max_shifted", "forward_backward_mismatch", coef=LAMBDA),
    ),
    # reported values where tokens are ignored
    "reports Z over all tokens": (
        reports_z_over_all_tokens,
        {},
        found("reported_z_value", coef=LAMBDA, words="with ignored tokens"),
    ),
    "reports CE over all tokens": (reports_ce_over_all_tokens, {}, exact()),
    # one class apart
    **{
        f"class {index} weighs 4": (one_class_weighted(index, 4.0), {}, exact(ce_weights="class"))
        for index in (0, 1, 17, 50, 94, 95)
    },
    "class 33 weighs 0.25": (one_class_weighted(33, 0.25), {}, exact(ce_weights="class")),
    "class 2 weighs 4, normalised": (one_class_weighted(2, 4.0, normalised=True), {}, exact(ce_weights="class")),
    "class 2 weighs 4, shared": (one_class_weighted(2, 4.0, shared=True), {}, exact(ce_weights="class")),
    "fp32, class 50 weighs 4": (fp32(one_class_weighted(50, 4.0)), {}, exact(ce_weights="class", target=None)),
    "no Z for class 0": (no_z_for_class(0), {}, found("unexplained_source", words="class 0", coef=LAMBDA)),
    "no Z for class 61": (no_z_for_class(61), {}, found("unexplained_source", words="class 61", coef=LAMBDA)),
    # losses of (hidden, weight, target)
    "head": (head, {"linear": True}, exact()),
    "head, logits/√D": (over_root_of_width, {"linear": True}, exact(words="1/√D")),
    "head, logits/D": (over_width, {"linear": True}, exact(words="1/D")),
    "head, RMSNorm inside": (rms_norm_inside, {"linear": True}, cannot_tell("hidden")),
    "head, cosine": (cosine_head, {"linear": True}, cannot_tell()),
    "head, hidden normalised": (hidden_normalised, {"linear": True}, cannot_tell("hidden")),
    "head, LayerNorm inside": (layer_norm_inside, {"linear": True}, cannot_tell()),
    "head, weight [D, V]": (weight_transposed, {"linear": True}, exact(words="[D, V]")),
    # two penalties
    "raw and centered": (
        raw_and_centered,
        {},
        found(
            "unexplained_source",
            words="two penalties",
            coef=LAMBDA,
            extra={"centered_coef": 3 * LAMBDA, "centered_target": 0.0},
        ),
    ),
    # what depends on the dtype of the logits
    "Z of fp16 logits": (z_of_fp16_logits, {}, found("low_precision_source", coef=LAMBDA)),
    "no Z in 16 bits": (no_z_in_16_bits, {}, found("low_precision_source", coef=LAMBDA, words="bfloat16")),
    "no Z in fp16": (no_z_in_fp16, {}, found("low_precision_source", coef=LAMBDA, words="float16")),
    "upcast": (upcast, {}, exact()),
    "in place in fp32": (in_place_in_fp32, {}, found("overwrites_input", coef=LAMBDA, words="float32")),
    "in place in bf16": (in_place_in_bf16, {}, found("overwrites_input", coef=LAMBDA, words="bfloat16")),
    # state, chance and selection
    "Z on every 16th call": (EveryNthCall(16), {}, Answer(None, ids=frozenset({"not_repeatable"}))),
    "Z on every 3rd call": (EveryNthCall(3), {}, Answer(None, ids=frozenset({"not_repeatable"}))),
    "Python's random": (python_random, {}, Answer(None, ids=frozenset({"not_repeatable"}), words="random numbers")),
    "Python's random, half": (
        python_random_half,
        {},
        Answer(None, ids=frozenset({"not_repeatable"}), words="random numbers"),
    ),
    "Python's random, tokens": (
        python_random_tokens,
        {},
        Answer(None, ids=frozenset({"not_repeatable"}), words="random numbers"),
    ),
    "NumPy's random": (numpy_random, {}, Answer(None, ids=frozenset({"not_repeatable"}), words="random numbers")),
    "count cached by shape": (CountCachedByShape(), {}, Answer(None, ids=frozenset({"not_repeatable"}), words="shape")),
    "hardest 60 %": (hardest(0.6), {}, exact(ce_weights="token", z_weights="uniform")),
    "hardest 60 %, no Z": (hardest_without_z, {}, no_z(ce_weights="token")),
    "hardest 60 % by CE and Z": (hardest_with_z, {}, exact(ce_weights="token", z_weights="shared")),
    "rolled mask": (rolled_mask, {}, found("ignored_tokens_leak", coef=LAMBDA)),
    "rolled mask in Z": (rolled_mask_in_z, {}, found("ignored_tokens_leak", coef=LAMBDA)),
    # denominators in few bits
    "count in bf16": (count_rounded_to(torch.bfloat16), {}, found("size_dependent", coef=LAMBDA, words="counted")),
    "count in fp16": (count_rounded_to(torch.float16), {}, found("size_dependent", coef=LAMBDA, words="counted")),
    "count in fp32": (count_rounded_to(torch.float32), {}, exact()),
    "count of Z in bf16": (
        z_count_rounded_to(torch.bfloat16),
        {},
        found("size_dependent", coef=LAMBDA, words="counted"),
    ),
    "count of Z in fp16": (
        z_count_rounded_to(torch.float16),
        {},
        found("size_dependent", coef=LAMBDA, words="counted"),
    ),
    # a function without targets
    "a router's Z-loss": (router_z_loss, {}, exact(ce_denominator="none", z_denominator="all", words="audit_router")),
}
