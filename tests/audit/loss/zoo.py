"""Unusual losses as they are found in repositories, each with the answer the audit owes; and the parts all losses are made of.

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
LOG_V = math.log(96)
Loss = Callable[..., Any]


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


def unexplained(words: str, *ids: str, **more: Any) -> Answer:
    return found("unexplained_source", *ids, words=words, **more)


def cannot_tell(words: str = "") -> Answer:
    return Answer(None, words=words, ids=frozenset({"unexplained_source"}))


def unstable(words: str = "") -> Answer:
    return Answer(None, words=words, ids=frozenset({"not_repeatable"}))


# The parts of a loss.


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


def fused_gradient(z: Tensor, y: Tensor, coef: float, c: float = 0.0, smoothing: float = 0.0) -> Tensor:
    """(1 + 2λ(log Z − c)) p − (1 − ε) onehot(y) − ε/V of each valid row; zero in ignored rows."""
    log_z = lse(z)[:, None]
    grad = (1 + 2 * coef * (log_z - c)) * torch.exp(z - log_z) - smoothing / z.shape[-1]
    grad[torch.arange(len(y)), y.clamp(min=0)] -= 1 - smoothing
    return torch.where(valid_of(y)[:, None], grad, 0.0)


def wide(z: Tensor) -> Tensor:
    """fp32 at least: 16-bit logits are widened, fp64 ones are kept."""
    return z if z.dtype == torch.float64 else z.float()


def valid_of(y: Tensor, ignore: int = IGNORE) -> Tensor:
    return y != ignore


def count_of(y: Tensor, ignore: int = IGNORE) -> Tensor:
    return valid_of(y, ignore).sum().clamp(min=1)


def pick(z: Tensor, y: Tensor) -> Tensor:
    return z.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def lse(z: Tensor) -> Tensor:
    return torch.logsumexp(z, -1)


def mean(rows: Tensor, y: Tensor, ignore: int = IGNORE) -> Tensor:
    """The mean over valid tokens; 0 where all are ignored."""
    return rows[valid_of(y, ignore)].sum() / count_of(y, ignore)


def nll(z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of each token; 0 at ignored ones."""
    return F.cross_entropy(z, y, ignore_index=IGNORE, reduction="none")


def ce_sum(z: Tensor, y: Tensor, ignore: int = IGNORE, **options: Any) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=ignore, reduction="sum", **options)


def ce(z: Tensor, y: Tensor, ignore: int = IGNORE, **options: Any) -> Tensor:
    return ce_sum(z, y, ignore, **options) / count_of(y, ignore)


def z_sum(z: Tensor, y: Tensor, c: float = 0.0) -> Tensor:
    """Σ (log Z − c)² over valid tokens."""
    return torch.where(valid_of(y), lse(z) - c, 0.0).square().sum()


def zl(z: Tensor, y: Tensor, coef: float = LAMBDA, c: float = 0.0, ignore: int = IGNORE) -> Tensor:
    return coef * mean((lse(z) - c) ** 2, y, ignore)


def plain(z: Tensor, y: Tensor, coef: float = LAMBDA, c: float = 0.0) -> Tensor:
    return ce(z, y) + zl(z, y, coef, c)


def total(z: Tensor, y: Tensor) -> Tensor:
    """The sum of CE and λ log² Z over valid tokens."""
    return ce_sum(z, y) + LAMBDA * z_sum(z, y)


def rows_of(z: Tensor, y: Tensor) -> Tensor:
    """CE + λ log² Z of each token; 0 at ignored ones."""
    return torch.where(valid_of(y), nll(z, y) + LAMBDA * lse(z) ** 2, 0.0)


def adding(part: Loss) -> Loss:
    """CE plus another part."""
    return lambda z, y: ce(z, y) + part(z, y)


def penalty(f: Callable[[Tensor], Tensor], coef: float = LAMBDA) -> Loss:
    """CE plus λ·mean f(log Z)."""
    return adding(lambda z, y: coef * mean(f(lse(z)), y))


def of(change: Callable[[Tensor], Tensor]) -> Loss:
    """The right loss of changed logits."""
    return lambda z, y: plain(change(z), y)


def z_of(change: Callable[[Tensor], Tensor]) -> Loss:
    """CE, and Z of changed logits."""
    return adding(lambda z, y: zl(change(z), y))


def z_on(some: Callable[[Tensor, Tensor], Tensor], over: Callable[[Tensor], Tensor] | None = None) -> Loss:
    """CE, and Z on the tokens `some(z, y)` only, over their number or over `over(y)`."""

    def part(z: Tensor, y: Tensor) -> Tensor:
        on = some(z, y)
        return LAMBDA * lse(z)[on].square().sum() / (on.sum().clamp(min=1) if over is None else over(y))

    return adding(part)


def z_over(count: Callable[[Tensor], Any]) -> Loss:
    """CE over valid tokens, Z over another count."""
    return adding(lambda z, y: LAMBDA * z_sum(z, y) / count(y))


def both_over(count: Callable[[Tensor], Any]) -> Loss:
    return lambda z, y: total(z, y) / count(y)


def capped(cap: float, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    return lambda z: cap * torch.tanh(scale * z / cap)


def fp32(loss: Loss) -> Loss:
    """The same loss on logits cast to fp32, as most code has it."""
    return lambda z, y: loss(z.float(), y)


def linear(loss: Loss = plain, change: Callable[[Tensor, Tensor], Tensor] = lambda h, w: h @ w.T) -> Loss:
    """A loss of (hidden, weight, target) whose logits are `change(hidden, weight)`."""
    return lambda h, w, y: loss(change(h, w), y)


# Weights, groups and targets.


def ignoring(index: int) -> Loss:
    return lambda z, y: ce(z, y, index) + zl(z, y, ignore=index)


def ours_ignoring(index: int) -> Loss:
    return lambda z, y: zloss.logits_loss(z, y, zloss.StandardZLoss(LAMBDA, 0.0), ignore_index=index)


def embedding_pad(z: Tensor, y: Tensor) -> Tensor:
    mask = (y > 0).to(z.dtype)
    return (rows_of(z, y.clamp(min=0)) * mask).sum() / mask.sum().clamp(min=1)


def class_weights(vocab: int = 96, *, shared: bool = False, normalised: bool = True) -> Loss:
    weight = 0.5 + torch.arange(vocab, dtype=torch.float64) / vocab

    def loss(z: Tensor, y: Tensor) -> Tensor:
        w = weight.to(z.dtype)
        own = w[y[valid_of(y)]]
        n = (own.sum() if normalised else valid_of(y).sum()).clamp(min=1e-9)
        weighted = F.cross_entropy(z, y, weight=w, reduction="sum") / n
        return weighted + (LAMBDA * (own * lse(z)[valid_of(y)] ** 2).sum() / n if shared else zl(z, y))

    return loss


def by_position(y: Tensor, dtype: torch.dtype) -> Tensor:
    return 0.25 + torch.arange(len(y)).to(dtype) % 5


def token_weights(z: Tensor, y: Tensor) -> Tensor:
    w = by_position(y, z.dtype) * valid_of(y)
    return (w * rows_of(z, y)).sum() / w.sum().clamp(min=1e-9)


def our_token_weights(z: Tensor, y: Tensor) -> Any:
    w = by_position(y, torch.float32)
    return zloss.logits_loss(z, y, zloss.StandardZLoss(LAMBDA, 0.0), token_weight=w)


def token_weights_on_ce_only(z: Tensor, y: Tensor) -> Tensor:
    w = by_position(y, z.dtype) * valid_of(y)
    return (w * nll(z, y)).sum() / w.sum().clamp(min=1e-9) + zl(z, y)


def one_class_weighted(index: int, weight: float, *, shared: bool = False, normalised: bool = False) -> Loss:
    """The CE of one class weighs `weight` times that of the others."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        w = torch.where(y == index, weight, 1.0).to(z.dtype) * valid_of(y)
        n = w.sum().clamp(min=1e-9) if normalised else count_of(y)
        return (w * rows_of(z, y.clamp(min=0))).sum() / n if shared else (w * nll(z, y)).sum() / n + zl(z, y)

    return loss


def focal(z: Tensor, y: Tensor) -> Tensor:
    return mean((1 - torch.exp(-nll(z, y))) ** 2 * nll(z, y), y)


def mean_of_means(split: Callable[[Tensor], Any]) -> Loss:
    """The mean over groups of the means of each, groups without valid tokens left out."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        parts = [plain(a, b) for a, b in zip(split(z), split(y), strict=True)]
        return torch.stack(parts).sum() / max(sum(int(bool(valid_of(b).any())) for b in split(y)), 1)

    return loss


def mean_of_all(split: Callable[[Tensor], Any]) -> Loss:
    """The same over all groups."""
    return lambda z, y: torch.stack([plain(a, b) for a, b in zip(split(z), split(y), strict=True)]).mean()


def second_half_only(z: Tensor, y: Tensor) -> Tensor:
    """Prompt tokens are masked by position."""
    on = (torch.arange(len(y)) >= len(y) // 2) & valid_of(y)
    return rows_of(z, y)[on].sum() / on.sum().clamp(min=1)


def rolled_mask(z: Tensor, y: Tensor) -> Tensor:
    """The mask is that of the next row, for CE and Z alike."""
    on = valid_of(y).roll(1)
    return rows_of(z, y.clamp(min=0))[on].sum() / on.sum().clamp(min=1)


def hardest(z: Tensor, y: Tensor) -> Tensor:
    """CE on the 60 % of the tokens with the largest losses; Z on all of them."""
    rows = nll(z, y)[valid_of(y)]
    k = max(int(0.6 * len(rows)), 1)
    return rows.topk(min(k, len(rows))).values.sum() / k + zl(z, y)


def hardest_of(rows: Loss) -> Loss:
    return lambda z, y: rows(z, y).topk(max(int(0.6 * len(y)), 1)).values.mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    """As Hugging Face models do."""
    z, y = z[..., :-1, :], y[..., 1:]
    return plain(z.reshape(-1, z.shape[-1]), y.reshape(-1))


def padded_shift(z: Tensor, y: Tensor) -> Tensor:
    """Newer Hugging Face models pad the labels and shift them, and leave the logits whole."""
    return plain(z, F.pad(y, (0, 1), value=IGNORE)[..., 1:])


def rolled(z: Tensor, y: Tensor) -> Tensor:
    return plain(z, y.roll(-1))


def three_axes(z: Tensor, y: Tensor) -> Tensor:
    """[B, T, V] only, shifted inside."""
    assert z.dim() == 3
    z, y = z[:, :-1].contiguous(), y[:, 1:].contiguous()
    return F.cross_entropy(z.view(-1, z.shape[-1]), y.view(-1)) + LAMBDA * lse(z)[y != IGNORE].square().mean()


class AsModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.criterion(z, y) + LAMBDA * lse(z)[y != 0].square().mean()


# Label smoothing and penalties of another form.


def t5x(z: Tensor, y: Tensor, smoothing: float = 0.1, coef: float = LAMBDA) -> Tensor:
    """Confidence 1 − ε on the target, ε/(V − 1) elsewhere; the entropy of that is taken off."""
    vocab = z.shape[-1]
    high, low = 1 - smoothing, smoothing / (vocab - 1)
    constant = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    soft = torch.full_like(z, low).scatter(-1, y.clamp(min=0).unsqueeze(-1), high)
    return mean(-(soft * torch.log_softmax(z, -1)).sum(-1) - constant + coef * lse(z) ** 2, y)


def batch_variance(z: Tensor, y: Tensor) -> Tensor:
    v = lse(z)[valid_of(y)]
    return ce(z, y) + LAMBDA * (v - v.mean()).square().sum() / count_of(y)


def entropy_bonus(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + 0.01 * mean((torch.softmax(z, -1) * torch.log_softmax(z, -1)).sum(-1), y)


def z_without_the_target(z: Tensor, y: Tensor) -> Tensor:
    """The penalty is on the log-sum-exp of the other classes: nearly log Z wherever the target is unlikely."""
    others = torch.where(torch.arange(z.shape[-1]) == y.unsqueeze(-1), -torch.inf, z)
    return ce(z, y) + LAMBDA * mean(lse(others).square(), y)


def raw_and_centered(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + mean(LAMBDA * lse(z) ** 2 + 3 * LAMBDA * (lse(z) - z.mean(-1)) ** 2, y)


# Returned values.


def returning(what: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]) -> Loss:
    """A loss that returns `what` of its logits, targets, total, CE and Z."""
    return lambda z, y: what(z, y, plain(z, y), ce(z, y), zl(z, y))


def accuracy(z: Tensor, y: Tensor) -> Tensor:
    return (z.argmax(-1) == y).double().mean()


RETURNED: dict[str, Callable[..., Any]] = {
    "total, ce, z": lambda z, y, loss, c, p: (loss, c, p),
    "total, ce, z, detached": lambda z, y, loss, c, p: (loss, c.detach(), p.detach()),
    "loss, logits": lambda z, y, loss, c, p: (loss, z),
    "logits, loss": lambda z, y, loss, c, p: (z, loss),
    "loss, n tensor": lambda z, y, loss, c, p: (loss, count_of(y)),
    "loss, accuracy": lambda z, y, loss, c, p: (loss, accuracy(z, y)),
    "loss, float metrics": lambda z, y, loss, c, p: (
        loss,
        {"ce": float(c), "z_loss": float(p), "accuracy": float(accuracy(z, y))},
    ),
    "loss, z without λ": lambda z, y, loss, c, p: (loss, (p / LAMBDA).detach()),
    "loss, mean log Z": lambda z, y, loss, c, p: (loss, lse(z).mean().detach()),
    "dict": lambda z, y, loss, c, p: {"loss": loss, "ce_loss": c, "z_loss": p},
    "dict of total": lambda z, y, loss, c, p: {"ce": c.detach(), "z": p.detach(), "total_loss": loss},
    "model output": lambda z, y, loss, c, p: SimpleNamespace(loss=loss, logits=z, past_key_values=None),
    "loss, None": lambda z, y, loss, c, p: (loss, None),
    "list": lambda z, y, loss, c, p: [loss, p.detach()],
}


# Precision, state and sizes.


def scaled_by_a_hook(z: Tensor, y: Tensor) -> Tensor:
    z = z * 1.0
    z.register_hook(lambda grad: 8.0 * grad)
    return plain(z, y)


def in_place(z: Tensor, y: Tensor) -> Tensor:
    z.mul_(1.0).add_(0.5)
    return plain(z, y)


def in_place_in_fp32(z: Tensor, y: Tensor) -> Tensor:
    """As Megatron's `vocab_parallel_cross_entropy`, exp overwrites the logits; `float()` hands fp32 through uncopied."""
    x, log_z = z.float().detach(), lse(z.float().detach())
    grad = fused_gradient(x, y, LAMBDA) / count_of(y)
    value = mean(log_z - pick(x, y) + LAMBDA * log_z**2, y)
    x.sub_(log_z[:, None]).exp_()
    return by_hand(value, lambda upstream: (upstream * grad,), z.float())


def in_place_in_bf16(z: Tensor, y: Tensor) -> Tensor:
    loss = plain(z * 1.0, y)
    if z.dtype == torch.bfloat16:
        with torch.no_grad():
            z.sub_(1.0)
    return loss


def no_z_in(*dtypes: torch.dtype) -> Loss:
    return lambda z, y: ce(z, y) if z.dtype in dtypes else plain(z, y)


class Counting:
    """A loss that knows how often it was called: `coef(n)` is the λ of call n."""

    def __init__(self, coef: Callable[[int], float]) -> None:
        self.calls, self.coef = 0, coef

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return plain(z, y, self.coef(self.calls))


class CountCachedByShape:
    """The count of valid tokens is looked up by the shape of the batch: right until a mask changes."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return total(z, y) / self.counts.setdefault(tuple(z.shape), count_of(y))


def some_by_chance(z: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([random.random() < 0.9 for _ in range(len(y))]) & valid_of(y)


def always_the_same_half(z: Tensor, y: Tensor) -> Tensor:
    return (torch.rand(len(y), generator=torch.Generator().manual_seed(3)) < 0.5) & valid_of(y)


def wants(accepts: Callable[[Tensor], bool]) -> Loss:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        if not accepts(z):
            raise ValueError("a wrong number of tokens or classes")
        return plain(z, y)

    return loss


def whole_blocks(n: int, block: int) -> int:
    """The largest multiple of `block` up to n; n itself where there is no whole block."""
    return n // block * block or n


def drops_last_tokens(block: int) -> Loss:
    """Rows beyond the last whole block are left out, once there is more than one block."""
    return lambda z, y: plain(z[: whole_blocks(len(y), block)], y[: whole_blocks(len(y), block)])


def tail_missing_in_z(block: int) -> Loss:
    """Columns beyond the last whole block are missing from log Z of the penalty."""
    return z_of(lambda z: z[:, : whole_blocks(z.shape[-1], block)])


def chunked(size: int) -> Loss:
    """A right chunked loss: sums, divided once."""
    return lambda z, y: sum(total(a, b) for a, b in zip(z.split(size), y.split(size), strict=True)) / count_of(y)


def rounded_count(dtype: torch.dtype) -> Callable[[Tensor], float]:
    """The count of valid tokens in a narrow format: exact up to 256 in bf16, 2048 in fp16, 2^24 in fp32."""
    return lambda y: float(count_of(y).to(dtype))


def router_z_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Megatron's `z_loss_func` with its coefficient bound, as a user passes it to the audit."""
    return LAMBDA * torch.logsumexp(logits, dim=-1).square().mean()


SHARED = {"z_weights": "shared"}
CURVE = "a function of log Z"
BF16, FP16 = torch.bfloat16, torch.float16
ONE_SIDED = penalty(lambda v: F.relu(v - 7.3) ** 2)
EVERY_OTHER = z_on(lambda z, y: (torch.arange(len(y)) % 2 == 0) & valid_of(y))
CHUNK_MEANS = mean_of_means(lambda x: x.split(16))
FEW_TOKENS = "32 of 64 tokens only (row 0, 2, 4, 6, …)"

OF_LOGITS: dict[str, tuple[Loss, Answer]] = {
    # squares and other forms
    "pad 0, not told": (embedding_pad, exact()),
    "missing square": (penalty(lambda v: v), unexplained("linear in log Z")),
    "absolute": (penalty(torch.abs), unexplained(CURVE)),
    "cube": (penalty(lambda v: v.abs() ** 3), unexplained(CURVE)),
    "power 1.5": (penalty(lambda v: v.abs() ** 1.5), unexplained(CURVE)),
    "one-sided": (ONE_SIDED, unexplained(CURVE)),
    "one-sided below": (penalty(lambda v: F.relu(7.3 - v) ** 2), unexplained(CURVE)),
    "Huber": (
        penalty(lambda v: 2 * F.huber_loss(v, torch.full_like(v, 3.0), delta=10.0, reduction="none")),
        unexplained(CURVE),
    ),
    "smooth L1": (penalty(lambda v: F.smooth_l1_loss(v, torch.zeros_like(v), reduction="none")), unexplained(CURVE)),
    "log cosh": (penalty(lambda v: torch.log(torch.cosh(v / 8))), unexplained(CURVE)),
    "variance": (batch_variance, unexplained("depends on the batch")),
    # weights of classes, positions and tokens
    "class weights": (class_weights(), exact(ce_weights="class", z_weights="uniform")),
    "class weights of 1000 classes": (class_weights(1000), exact(ce_weights="class")),
    "class weights, shared": (class_weights(shared=True), exact(ce_weights="class", **SHARED)),
    "class weights over n": (class_weights(normalised=False), exact(ce_weights="class")),
    "token weights": (token_weights, exact(ce_weights="position", **SHARED)),
    "our token weights": (our_token_weights, exact(ce_weights="position", **SHARED)),
    "token weights on CE": (token_weights_on_ce_only, exact(ce_weights="position", z_weights="uniform")),
    "focal": (focal, no_z(ce_weights="token")),
    "focal with Z": (lambda z, y: focal(z, y) + zl(z, y), exact(ce_weights="token")),
    "poly loss with Z": (adding(lambda z, y: mean(1 - torch.exp(-nll(z, y)), y) + zl(z, y)), exact(ce_weights="token")),
    # targets
    "shifted": (shifted, exact(targets="shifted")),
    "shifted by padding": (padded_shift, exact(targets="shifted")),
    "shifted, no Z": (lambda z, y: ce(z[:-1], y[1:]), no_z(targets="shifted")),
    "shifted, Z over all rows": (
        lambda z, y: ce(z[:-1], y[1:]) + LAMBDA * lse(z).square().mean(),
        found("ignored_tokens_leak", "denominator_mismatch", targets="shifted", coef=LAMBDA),
    ),
    "rolled": (rolled, found("targets_moved", targets="rolled", coef=LAMBDA)),
    "targets ignored": (
        lambda z, y: ce(z, z.argmax(-1)) + LAMBDA * lse(z).square().mean(),
        found("unexplained_source", "ignored_tokens_leak", has_z=None),
    ),
    "only the penalty": (zl, exact(ce_denominator="none")),
    # logits before the softmax
    "scale and softcap": (of(capped(20.0, 0.5)), exact()),
    "scale and softcap, other": (of(capped(50.0, 1.7)), exact()),
    "temperature": (of(lambda z: z / 0.7), exact()),
    "Z of capped logits": (z_of(capped(30.0)), cannot_tell()),
    "Z of scaled logits": (z_of(lambda z: z / 2), cannot_tell()),
    # a Z on some tokens, or of another form
    "every other token": (EVERY_OTHER, unexplained(FEW_TOKENS)),
    "last token only": (
        adding(lambda z, y: LAMBDA * lse(z[-1]).square()),
        unexplained("1 of 64 tokens only (row 63)", "ignored_tokens_leak"),
    ),
    "random tokens": (z_on(always_the_same_half), unexplained("of 64 tokens")),
    "tokens by target": (
        z_on(lambda z, y: (z.argmax(-1) != y) & (y % 3 == 0), count_of),
        unexplained("some tokens only"),
    ),
    "entropy bonus": (entropy_bonus, cannot_tell()),
    "sum of Z clipped": (adding(lambda z, y: zl(z, y).clamp(max=0.5)), cannot_tell("calm logits")),
    "root of the mean": (
        adding(lambda z, y: LAMBDA * (zl(z, y, 1.0) + 1e-12).sqrt()),
        unexplained("depends on the batch"),
    ),
    "scaled by the loss": (
        adding(lambda z, y: ce(z, y).detach() * zl(z, y)),
        unexplained("depends on the batch", "forward_backward_mismatch"),
    ),
    "second half only": (second_half_only, exact(ce_weights="position", **SHARED)),
    "top classes in log Z": (z_of(lambda z: z.topk(20, -1).values), cannot_tell()),
    "targets plus one": (lambda z, y: plain(z, torch.where(valid_of(y), (y + 1) % z.shape[-1], y)), cannot_tell()),
    "three axes, shifted": (three_axes, exact(targets="shifted")),
    "a constant divisor": (
        lambda z, y: plain(z, y) * count_of(y) / 1000,
        exact(1e-6, ce_denominator="sum", z_denominator="sum", ce_scale=1e-3),
    ),
    "CE in bits": (lambda z, y: ce(z, y) / math.log(2) + zl(z, y), exact(ce_scale=1 / math.log(2))),
    "mean square of the logits": (adding(lambda z, y: LAMBDA * mean(z.square().mean(-1), y)), cannot_tell()),
    # denominators and targets c: never called a tail
    "c = log V − 1": (
        lambda z, y: plain(z, y, c=math.log(z.shape[-1]) - 1),
        exact(target=LOG_V - 1, target_rule="log_v"),
    ),
    "c = √V/10": (
        lambda z, y: plain(z, y, c=math.sqrt(z.shape[-1]) / 10),
        unexplained("c changes with the vocabulary"),
    ),
    "Z/√N": (
        z_over(lambda y: count_of(y).sqrt()),
        found("denominator_mismatch", coef=LAMBDA, z_denominator="sqrt_valid"),
    ),
    "Z/(N + 1)": (z_over(lambda y: valid_of(y).sum() + 1), exact(z_denominator="valid+1")),
    "both over N + 1": (
        both_over(lambda y: valid_of(y).sum() + 1),
        exact(ce_denominator="valid+1", z_denominator="valid+1"),
    ),
    "t5x smoothing": (t5x, exact(label_smoothing=0.1)),
    "t5x smoothing, no Z": (lambda z, y: t5x(z, y, coef=0.0), no_z(label_smoothing=0.1)),
    "torch smoothing": (lambda z, y: ce(z, y, label_smoothing=0.1) + zl(z, y), exact(label_smoothing=0.1)),
    # returned values
    **{f"returns {what}": (returning(returned), exact()) for what, returned in RETURNED.items()},
    "returns sum, n": (
        lambda z, y: (plain(z, y) * count_of(y), int(count_of(y))),
        exact(ce_denominator="sum", z_denominator="sum"),
    ),
    "returns ce, z": (lambda z, y: (ce(z, y), zl(z, y)), no_z()),
    "returns ce, z without λ": (lambda z, y: (ce(z, y), zl(z, y, 1.0)), no_z()),
    "returns ce without z, logits": (lambda z, y: (ce(z, y), z), no_z()),
    "reports 16 times Z": (lambda z, y: (plain(z, y), 16 * zl(z, y).detach()), exact()),
    "calls something else z": (lambda z, y: {"loss": plain(z, y), "z_loss": z.square().mean().detach()}, exact()),
    # kinks
    "clamped ±50": (of(lambda z: z.clamp(-50, 50)), cannot_tell()),
    "clamped above 30.5": (of(lambda z: z.clamp(max=30.5)), cannot_tell()),
    "clamped ±100": (of(lambda z: z.clamp(-100, 100)), cannot_tell()),
    # means of means
    "means of chunks": (CHUNK_MEANS, exact(ce_weights="groups", **SHARED)),
    "means of sequences": (mean_of_all(lambda x: x.chunk(2)), exact(ce_weights="groups", **SHARED)),
    "mean of four chunks": (mean_of_all(lambda x: x.chunk(4)), exact(ce_weights="groups", **SHARED)),
    # sizes
    "wants V = 50257": (wants(lambda z: z.shape[-1] == 50257), exact()),
    "wants V = 211": (wants(lambda z: z.shape[-1] == 211), exact()),
    "wants multiples of 128": (wants(lambda z: len(z) % 128 == 0), exact()),
    "wants multiples of 48": (wants(lambda z: len(z) % 48 == 0), exact()),
    "drops tokens beyond blocks of 128": (drops_last_tokens(128), found("size_dependent", words="no gradient")),
    "drops tokens beyond blocks of 512": (drops_last_tokens(512), found("size_dependent", words="no gradient")),
    "counts at most 256": (z_over(lambda y: count_of(y).clamp(max=256)), found("size_dependent", words="λ")),
    "tail of 4096 missing": (tail_missing_in_z(4096), found("size_dependent", words="V = 5,003: ")),
    "tail of 65536 missing": (tail_missing_in_z(65536), found("size_dependent", words="V = 70,001")),
    "beyond 65536": (z_of(lambda z: z[:, :65536]), found("size_dependent", words="V = 70,001")),
    "chunked, right": (chunked(100), exact()),
    # the same in fp32, where rounding must not be read as structure
    "fp32, missing square": (fp32(penalty(lambda v: v)), unexplained("linear in log Z")),
    "fp32, one-sided": (fp32(ONE_SIDED), unexplained(CURVE)),
    "fp32, class weights": (fp32(class_weights()), exact(ce_weights="class", target=None)),
    "fp32, token weights": (fp32(token_weights), exact(ce_weights="position", target=None, **SHARED)),
    "fp32, focal": (fp32(focal), no_z(ce_weights="token")),
    "fp32, shifted": (fp32(shifted), exact(targets="shifted")),
    "fp32, clamped ±50": (fp32(of(lambda z: z.clamp(-50, 50))), cannot_tell()),
    "fp32, softcap": (fp32(of(capped(30.0))), exact(target=None)),
    "fp32, scale and softcap": (fp32(of(capped(30.0, 0.5))), exact(target=None)),
    "fp32, t5x smoothing": (fp32(t5x), exact(label_smoothing=0.1, target=None)),
    "fp32, means of chunks": (fp32(CHUNK_MEANS), exact(ce_weights="groups", **SHARED)),
    "fp32, every other token": (fp32(EVERY_OTHER), unexplained(FEW_TOKENS)),
    "fp32, tail of 4096 missing": (fp32(tail_missing_in_z(4096)), found("size_dependent", words="V = 5,003")),
    "fp32, λ = 1e-6, c = log V": (
        fp32(lambda z, y: plain(z, y, 1e-6, math.log(z.shape[-1]))),
        exact(1e-6, target=LOG_V, target_rule="log_v"),
    ),
    # precision and graphs
    "bf16 inside": (lambda z, y: plain(z.bfloat16(), y).float(), found("low_precision_source", coordinate="raw")),
    "fp16 logits in CE": (lambda z, y: ce(z.half().float(), y) + zl(z, y), found("low_precision_source")),
    "Z under no_grad": (
        adding(torch.no_grad()(zl)),
        found("zero_gradient_z", "forward_backward_mismatch", has_z=False),
    ),
    "schedule": (Counting(lambda n: LAMBDA * (1 + 0.05 * n)), unstable()),
    "slow schedule": (Counting(lambda n: LAMBDA * (1 + 1e-4 * n)), unstable()),
    "gradient scaled by a hook": (scaled_by_a_hook, found("forward_backward_mismatch")),
    "in place": (in_place, found("overwrites_input")),
    # variants people write
    "fp32 of bf16 logits": (of(lambda z: z.bfloat16().float()), found("low_precision_source", coordinate="raw")),
    "fp32 of the given logits": (fp32(plain), exact()),
    "label smoothing, c = log V": (
        lambda z, y: ce(z, y, label_smoothing=0.1) + zl(z, y, c=math.log(z.shape[-1])),
        exact(target=LOG_V, target_rule="log_v", label_smoothing=0.1),
    ),
    "CE over all, Z over valid": (
        lambda z, y: ce_sum(z, y) / y.numel() + zl(z, y),
        found("denominator_mismatch", coef=LAMBDA),
    ),
    "Z of detached logits": (z_of(torch.detach), found("zero_gradient_z", "forward_backward_mismatch", has_z=False)),
    "wrong sign": (
        lambda z, y: ce(z, y) - zl(z, y),
        found("negative_coefficient", coef=-LAMBDA, target_rule="constant"),
    ),
    "Z of the other classes": (z_without_the_target, cannot_tell()),
    "temperature in CE only": (lambda z, y: ce(z / 2.0, y) + zl(z, y), cannot_tell()),
    "shifted by the maximum": (of(lambda z: z - z.amax(-1, keepdim=True)), found("max_shifted", coef=LAMBDA)),
    "shifted by a detached maximum": (
        of(lambda z: z - z.amax(-1, keepdim=True).detach()),
        found("max_shifted", "forward_backward_mismatch", coef=LAMBDA),
    ),
    # reported values that differ from the trained ones only where tokens are ignored
    "reports Z over all tokens": (lambda z, y: (plain(z, y), LAMBDA * lse(z).square().mean().detach()), exact()),
    "reports CE over all tokens": (
        lambda z, y: {"loss": plain(z, y), "ce": ce_sum(z, y).detach() / y.numel(), "z_loss": zl(z, y).detach()},
        exact(),
    ),
    # one class apart
    **{
        f"class {index} weighs 4": (one_class_weighted(index, 4.0), exact(ce_weights="class"))
        for index in (0, 1, 17, 50, 94, 95)
    },
    "class 33 weighs 0.25": (one_class_weighted(33, 0.25), exact(ce_weights="class")),
    "class 2 weighs 4, normalised": (one_class_weighted(2, 4.0, normalised=True), exact(ce_weights="class")),
    "class 2 weighs 4, shared": (one_class_weighted(2, 4.0, shared=True), exact(ce_weights="class")),
    "fp32, class 50 weighs 4": (fp32(one_class_weighted(50, 4.0)), exact(ce_weights="class", target=None)),
    **{
        f"no Z for class {index}": (
            z_on(lambda z, y, index=index: valid_of(y) & (y != index), count_of),
            unexplained(f"class {index}", coef=LAMBDA),
        )
        for index in (0, 61)
    },
    "raw and centered": (raw_and_centered, unexplained("two penalties", coef=LAMBDA)),
    # what depends on the dtype of the logits
    "Z of fp16 logits": (z_of(lambda z: z.half().to(z.dtype)), found("low_precision_source", coef=LAMBDA)),
    "no Z in 16 bits": (no_z_in(BF16, FP16), found("low_precision_source", coef=LAMBDA, words="bfloat16")),
    "no Z in fp16": (no_z_in(FP16), found("low_precision_source", coef=LAMBDA, words="float16")),
    "upcast": (of(wide), exact()),
    "in place in fp32": (in_place_in_fp32, found("overwrites_input", coef=LAMBDA, words="float32")),
    "in place in bf16": (in_place_in_bf16, found("overwrites_input", coef=LAMBDA, words="bfloat16")),
    # state, chance and selection
    "Z on every 16th call": (Counting(lambda n: LAMBDA if n % 16 == 0 else 0.0), unstable()),
    "Z on every 3rd call": (Counting(lambda n: LAMBDA if n % 3 == 0 else 0.0), unstable()),
    "Python's random": (lambda z, y: plain(z, y, LAMBDA * random.random()), unstable("random numbers")),
    "Python's random, half": (
        lambda z, y: plain(z, y, LAMBDA if random.random() < 0.5 else 0.0),
        unstable("random numbers"),
    ),
    "Python's random, tokens": (z_on(some_by_chance, count_of), unstable("random numbers")),
    "NumPy's random": (
        lambda z, y: plain(z, y, LAMBDA * float(numpy.random.rand())),  # noqa: NPY002
        unstable("random numbers"),
    ),
    "count cached by shape": (CountCachedByShape(), unstable("shape")),
    "hardest 60 %": (hardest, exact(ce_weights="token", z_weights="uniform")),
    "hardest 60 %, no Z": (hardest_of(nll), no_z(ce_weights="token")),
    "hardest 60 % by CE and Z": (hardest_of(rows_of), exact(ce_weights="token", **SHARED)),
    "rolled mask": (rolled_mask, found("ignored_tokens_leak", coef=LAMBDA)),
    "rolled mask in Z": (z_on(lambda z, y: valid_of(y).roll(1)), found("ignored_tokens_leak", coef=LAMBDA)),
    # denominators in few bits
    "count in bf16": (both_over(rounded_count(BF16)), exact()),
    "count in fp16": (both_over(rounded_count(FP16)), exact()),
    "count in fp32": (both_over(rounded_count(torch.float32)), exact()),
    "count of Z in bf16": (z_over(rounded_count(BF16)), exact()),
    "count of Z in fp16": (z_over(rounded_count(FP16)), exact()),
    # a function without targets
    "a router's Z-loss": (router_z_loss, exact(ce_denominator="none", z_denominator="all")),
}
OF_A_HEAD: dict[str, tuple[Loss, Answer]] = {
    "head": (linear(), exact()),
    "head, logits/√D": (linear(change=lambda h, w: h @ w.T / math.sqrt(h.shape[-1])), cannot_tell()),
    "head, logits/D": (linear(change=lambda h, w: h @ w.T / h.shape[-1]), cannot_tell()),
    "head, RMSNorm inside": (
        linear(change=lambda h, w: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) @ w.T),
        cannot_tell(),
    ),
    "head, cosine": (
        linear(change=lambda h, w: 16.0 * F.normalize(h, dim=-1) @ F.normalize(w, dim=-1).T),
        cannot_tell(),
    ),
    "head, hidden normalised": (linear(change=lambda h, w: F.normalize(h, dim=-1) @ w.T), cannot_tell()),
    "head, LayerNorm inside": (linear(change=lambda h, w: F.layer_norm(h, h.shape[-1:]) @ w.T), cannot_tell()),
    # as in GPT-2's Conv1D and in JAX
    "head, weight [D, V]": (linear(change=torch.matmul), exact()),
}
IGNORING: dict[str, tuple[Loss, int]] = {
    **{f"ignore_index {index}": (ignoring(index), index) for index in (0, 1, 95, 50256)},
    **{f"ours, ignore_index {index}": (ours_ignoring(index), index) for index in (0, 50256)},
    "a module with pad 0": (AsModule(), 0),
    "fp32, ignore_index 0": (fp32(ignoring(0)), 0),
}
STATED: dict[str, dict[str, Any]] = {
    "scale and softcap": {"logit_scale": 0.5, "softcap": 20.0},
    "scale and softcap, other": {"logit_scale": 1.7, "softcap": 50.0},
    "temperature": {"logit_scale": 1 / 0.7},
    "fp32, softcap": {"softcap": 30.0},
    "fp32, scale and softcap": {"logit_scale": 0.5, "softcap": 30.0},
    "class weights of 1000 classes": {"vocab": 1000},
    "wants V = 50257": {"vocab": 50257},
    "wants V = 211": {"vocab": 211},
    "wants multiples of 128": {"tokens": 512},
    "wants multiples of 48": {"tokens": 192},
}
"""What the users of these losses state: sizes that they insist on, and what they do to their logits."""
ZOO: dict[str, tuple[Loss, dict[str, Any], Answer]] = {
    **{name: (loss, {"ignore_index": index}, exact()) for name, (loss, index) in IGNORING.items()},
    **{name: (loss, STATED.get(name, {}), answer) for name, (loss, answer) in OF_LOGITS.items()},
    **{name: (loss, {"linear": True}, answer) for name, (loss, answer) in OF_A_HEAD.items()},
}
