"""Forty losses in the styles of real training code that the audit was not developed on, each with its truth.

`UNSEEN` maps a name to a `Case` (see `further`): 20 correct losses, 13 with a planted bug, 7 outside the family. The truths
were written down before any of these losses was audited; `test_truths` checks them without the audit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.audit.loss.further import Case, odd, right, some
from tests.audit.loss.zoo import (
    IGNORE,
    LAMBDA,
    LOG_V,
    by_hand,
    ce,
    ce_sum,
    count_of,
    fused_gradient,
    lse,
    mean,
    pick,
    plain,
    valid_of,
    wide,
    z_sum,
)

REAL_VOCAB = 90
ITEMS = 300


# Correct losses.


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor], Tensor]:
    def loss(pred: Tensor, labels: Tensor) -> Tensor:
        return plain(wide(pred.flatten(0, -2)), labels.flatten(), 1e-4)

    return torch.compile(loss, backend="aot_eager", dynamic=True)


def megatron_layout(z: Tensor, y: Tensor) -> Tensor:
    """Logits [s, b, V], labels and per-token losses [b, s], as in `compute_language_model_loss`."""
    logits, labels = wide(z).unsqueeze(1), y.unsqueeze(0)
    log_z = logits.logsumexp(-1)
    rows = log_z - pick(logits, labels.transpose(0, 1)) + 1e-4 * log_z.square()
    loss_mask = labels != IGNORE
    return rows.transpose(0, 1).contiguous().masked_fill(~loss_mask, 0.0).sum() / loss_mask.sum().clamp(min=1)


@dataclass
class LMOutput:
    logits: Tensor | None
    loss: Tensor
    ce_loss: Tensor
    z_loss: Tensor


class OlmoHead(nn.Module):
    """OLMo-core's head: sums over a division factor that the train module fixes for the whole batch."""

    def __init__(self, z_loss_multiplier: float, loss_div_factor: float) -> None:
        super().__init__()
        self.z_loss_multiplier, self.loss_div_factor = z_loss_multiplier, loss_div_factor

    def forward(self, logits: Tensor, labels: Tensor) -> LMOutput:
        logits = wide(logits)
        ce = ce_sum(logits, labels) / self.loss_div_factor
        z = self.z_loss_multiplier * z_sum(logits, labels) / self.loss_div_factor
        return LMOutput(None, ce + z, ce.detach(), z.detach())


def next_token_by_roll(z: Tensor, y: Tensor) -> Tensor:
    """levanter's way of shifting: the targets are rolled, and a mask drops the last position."""
    targets = y.roll(-1)
    keep = valid_of(targets) & (torch.arange(len(y)) != len(y) - 1)
    log_z = lse(wide(z))
    rows = log_z - pick(wide(z), targets) + 5e-4 * log_z**2
    return torch.where(keep, rows, 0.0).sum() / keep.sum().clamp(min=1)


def liger_linear(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks of 32 tokens, gradients formed in forward, label smoothing and Z by hand; the reported Z has no gradient."""
    coef, smoothing = 1e-4, 0.1
    h, w, n = wide(hidden.detach()), wide(weight.detach()), count_of(target)
    grad_h, grad_w, total, z_total = torch.empty_like(h), torch.zeros_like(w), h.new_zeros(()), h.new_zeros(())
    for start in range(0, len(target), 32):
        rows = slice(start, start + 32)
        logits, y = h[rows] @ w.T, target[rows]
        smoothed = (1 - smoothing) * pick(logits, y) + smoothing * logits.mean(-1)
        total += torch.where(valid_of(y), lse(logits) - smoothed, 0.0).sum()
        z_total += coef * z_sum(logits, y)
        grad = fused_gradient(logits, y, coef, smoothing=smoothing) / n
        grad_h[rows] = grad @ w
        grad_w += grad.T @ h[rows]
    loss = by_hand((total + z_total) / n, lambda upstream: (upstream * grad_h, upstream * grad_w), hidden, weight)
    return loss, z_total / n


def flash_rows(logits: Tensor, labels: Tensor, coef: float, scale: float) -> tuple[Tensor, Tensor]:
    """Per-token losses with a logit scale; backward honours a separate upstream gradient for each token."""
    z = wide(logits.detach()) * scale
    log_z = lse(z)
    z_losses = torch.where(valid_of(labels), coef * log_z**2, 0.0)
    rows = torch.where(valid_of(labels), log_z - pick(z, labels), 0.0) + z_losses
    grad = scale * fused_gradient(z, labels, coef)
    return by_hand(rows, lambda upstream: (upstream[:, None] * grad,), logits), z_losses


class FlashCrossEntropy(nn.Module):
    """The module around the kernel: sums over the count of valid labels."""

    def __init__(self, lse_square_scale: float, logit_scale: float) -> None:
        super().__init__()
        self.options = (lse_square_scale, logit_scale)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        return flash_rows(logits, labels, *self.options)[0]

    def forward(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses, z_losses = flash_rows(logits, labels, *self.options)
        return losses.sum() / count_of(labels), z_losses.sum() / count_of(labels)


FLASH = FlashCrossEntropy(1e-4, 0.5)


def causal_lm_loss(logits: Tensor, labels: Tensor, num_items_in_batch: int | None = None, coef: float = 1e-4) -> Tensor:
    """Hugging Face's `ForCausalLMLoss`: labels padded and shifted, sums over the items of the accumulated batch."""
    logits, shifted = wide(logits), F.pad(labels, (0, 1), value=IGNORE)[..., 1:].contiguous()
    items = count_of(shifted) if num_items_in_batch is None else num_items_in_batch
    return (ce_sum(logits, shifted) + coef * z_sum(logits, shifted)) / items


@dataclass
class LabelSmoother:
    """The smoother of the HF Trainer: masked sums over active tokens, the uniform part also over V."""

    epsilon: float = 0.1
    coef: float = LAMBDA

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        neg_log_p = -F.log_softmax(wide(logits), dim=-1)
        padding = labels.eq(IGNORE)
        active = (padding.numel() - padding.long().sum()).clamp(min=1)
        nll = pick(neg_log_p, labels).masked_fill(padding, 0.0).sum() / active
        uniform = neg_log_p.sum(-1).masked_fill(padding, 0.0).sum() / (active * logits.shape[-1])
        z = lse(wide(logits)).square().masked_fill(padding, 0.0).sum() / active
        return (1 - self.epsilon) * nll + self.epsilon * uniform + self.coef * z


def fairseq_criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
    """Sums; the trainer divides the gradients by the sample size, which is returned next."""
    nll, z = ce_sum(wide(logits), labels), LAMBDA * z_sum(wide(logits), labels)
    size = int(valid_of(labels).sum())
    return nll + z, size, {"nll_loss": nll.detach(), "z_loss": z.detach(), "ntokens": size, "nsentences": 1}


def sum_per_sequence(z: Tensor, y: Tensor) -> Tensor:
    """Sequences of 8 positions: summed within a sequence, averaged over the batch."""
    log_z = lse(wide(z))
    rows = torch.where(valid_of(y), log_z - pick(wide(z), y) + LAMBDA * log_z**2, 0.0)
    return rows.view(-1, 8).sum(dim=1).mean()


def relative_from_log_p(z: Tensor, y: Tensor) -> Tensor:
    """log Z − μ is the mean of −log p over the classes."""
    log_p = F.log_softmax(wide(z), -1)
    return mean(-pick(log_p, y) + LAMBDA * (-log_p.mean(-1) - math.log(z.shape[-1])) ** 2, y)


def factorized(z: Tensor, y: Tensor) -> Tensor:
    """The paper's factorized penalty by hand: μ towards 0, log Z − μ towards log V."""
    z = wide(z)
    shift = z.sum(-1) / z.shape[-1]
    relative = torch.logsumexp(z - shift[:, None], -1) - math.log(z.shape[-1])
    return ce(z, y) + mean(LAMBDA * shift.square() + LAMBDA * relative.square(), y)


def gain_aware(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """λ log² Z / (1 + β A²) with the gain A = ‖Wᵀp‖/‖p‖ as a constant."""
    logits = F.linear(wide(hidden), wide(weight))
    with torch.no_grad():
        p = torch.softmax(logits, -1)
        gain = (p @ wide(weight)).square().sum(-1) / p.square().sum(-1)
    return ce(logits, target) + LAMBDA * mean(lse(logits) ** 2 / (1 + 1e-2 * gain), target)


def gain_formula(z: Tensor, y: Tensor) -> Tensor:
    """The same with the identity as hidden states, so that W is the transposed logits."""
    p = torch.softmax(z, -1).detach()
    squared = torch.einsum("tv,sv->ts", p, z.detach()).norm(dim=-1) ** 2 / p.norm(dim=-1) ** 2
    return ce(z, y) + LAMBDA * mean(lse(z) ** 2 / (1 + 0.01 * squared), y)


class LearnedTemperature(nn.Module):
    """A trained logit scale, at 2 now; Z is of the scaled logits."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(2.0), dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return plain(wide(z) * self.log_scale.exp().to(wide(z).dtype), y, 2e-4)


def padding_bias(z: Tensor, y: Tensor) -> Tensor:
    """Columns from 90 on are padding and get a bias of −1e9."""
    bias = torch.where(torch.arange(z.shape[-1]) >= REAL_VOCAB, -1e9, 0.0)
    return plain(wide(z) + bias.to(wide(z).dtype), y)


@dataclass(frozen=True)
class ZConfig:
    """None means the default; 0 means off."""

    weight: float | None = None
    default: float = 1e-4

    def build(self) -> Callable[[Tensor, Tensor], Tensor]:
        coef = self.default if self.weight is None else self.weight
        if coef == 0.0:
            return lambda z, y: ce(wide(z), y)
        return lambda z, y: plain(wide(z), y, coef)


def vmapped(z: Tensor, y: Tensor) -> Tensor:
    """A loss of one token, mapped over the batch as in JAX code."""

    def token(row: Tensor, label: Tensor) -> Tensor:
        log_z = torch.logsumexp(row, 0)
        loss = log_z - row.gather(0, label.clamp(min=0)[None])[0] + 3e-4 * (log_z - 1.5) ** 2
        return torch.where(label == IGNORE, torch.zeros_like(loss), loss)

    return torch.vmap(token)(wide(z), y).sum() / count_of(y)


def blocked(*, tail: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A fused loss whose backward goes over blocks of 40 columns; without `tail` it leaves out the columns after the last one."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        z = wide(logits.detach())
        log_z = torch.logsumexp(torch.stack([lse(block) for block in z.split(40, -1)]), 0)
        weight, grad, vocab = valid_of(y).to(z.dtype) / count_of(y), torch.zeros_like(z), z.shape[-1]
        for at in range(0, vocab if tail else vocab - vocab % 40, 40):
            columns = torch.arange(at, min(at + 40, vocab))
            p = torch.exp(z[:, columns] - log_z[:, None])
            hit = (y[:, None] == columns).to(z.dtype)
            grad[:, columns] = ((1 + 2 * LAMBDA * log_z)[:, None] * p - hit) * weight[:, None]
        value = mean(log_z - pick(z, y) + LAMBDA * log_z**2, y)
        return by_hand(value, lambda upstream: (upstream * grad,), logits)

    return loss


def kl_to_uniform(z: Tensor, y: Tensor) -> Tensor:
    """CE + β KL(u ‖ p): log Z − μ enters without a square, which is label smoothing and not a Z."""
    log_p = F.log_softmax(wide(z), -1)
    uniform = torch.full_like(log_p, 1.0 / z.shape[-1])
    return mean(-pick(log_p, y) + 0.05 * F.kl_div(log_p, uniform, reduction="none").sum(-1), y)


def trl_chunked(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Shifted, in checkpointed chunks of 64 tokens; the mean entropy is logged."""

    def chunk(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(a, -1)
        entropy = torch.where(valid_of(b), -(log_p.exp() * log_p).sum(-1).detach(), 0.0).sum()
        return ce_sum(a, b) + 2e-4 * z_sum(a, b), entropy

    z, y = wide(z)[..., :-1, :], y[..., 1:]
    parts = [checkpoint(chunk, a, b, use_reentrant=False) for a, b in zip(z.split(64), y.split(64), strict=True)]
    loss, entropy = (torch.stack(part).sum() / count_of(y) for part in zip(*parts, strict=True))
    return {"loss": loss, "entropy": entropy.detach(), "num_tokens": valid_of(y).sum()}


# Losses with a planted bug.


def reporting(return_z: bool) -> Callable[[Tensor, Tensor], Any]:
    """`return_z_loss=False` hides the reported Z and still trains it."""

    def loss(z: Tensor, y: Tensor) -> Any:
        total, z_loss = plain(wide(z), y), LAMBDA * z_sum(wide(z), y) / count_of(y)
        return (total, z_loss.detach()) if return_z else total

    return loss


def batch_maximum(z: Tensor, y: Tensor) -> Tensor:
    """The maximum of the whole batch is subtracted for stability and never restored in Z."""
    z = wide(z)
    stable = z - z.detach().max()
    return ce(stable, y) + LAMBDA * mean(lse(stable) ** 2, y)


def adds_auxiliary(z: Tensor, y: Tensor) -> Tensor:
    """The model's loss contains its Z; the trainer adds the auxiliary loss of the output again."""
    nats, aux = ce(wide(z), y), LAMBDA * z_sum(wide(z), y, math.log(z.shape[-1])) / count_of(y)
    output = LMOutput(z, nats + aux, nats, aux)
    return output.loss + output.z_loss


def weighs_the_log_again(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """`z_loss` already contains λ and is multiplied by it once more for the log."""
    z_loss = 2e-2 * z_sum(wide(z), y) / count_of(y)
    return {"loss": ce(wide(z), y) + z_loss, "z_loss": 2e-2 * z_loss.detach()}


def kernel(z: Tensor, y: Tensor, coef: float, stored: torch.dtype | None = None, ce_only: bool = False) -> Tensor:
    """CE + λ log² Z with a gradient kept in `stored`; with `ce_only` the upstream gradient multiplies the CE part only."""
    x = wide(z.detach())
    grad, ce = (fused_gradient(x, y, scale) / count_of(y) for scale in (coef, 0.0))
    scaled, fixed = (ce, grad - ce) if ce_only else (grad, torch.zeros_like(grad))
    scaled = scaled.to(stored or x.dtype)
    return by_hand(plain(x, y, coef), lambda upstream: (upstream * scaled.to(upstream.dtype) + fixed,), z)


def trains_class_zero(z: Tensor, y: Tensor) -> Tensor:
    """Labels of −100 are clamped for the gather and never masked: ignored tokens are trained on class 0."""
    log_z = lse(wide(z))
    return (log_z - pick(wide(z), y) + LAMBDA * log_z**2).mean()


def masks_padding_in_place(z: Tensor, y: Tensor) -> Tensor:
    """The padding columns of the caller's logits are set to −inf."""
    with torch.no_grad():
        z[..., REAL_VOCAB:] = -math.inf
    return plain(wide(z), y)


def z_of_returned_lse(z: Tensor, y: Tensor) -> Tensor:
    """Z is built from the log Z that a kernel returns without a gradient."""
    ce, log_z = kernel(z, y, 0.0), lse(wide(z.detach()))
    return ce + LAMBDA * mean(log_z**2, y)


def injected_by_hook(z: Tensor, y: Tensor) -> Tensor:
    """The value is CE; a hook on the logits adds the Z source to the gradient."""
    z = wide(z) * 1.0
    source = (fused_gradient(z.detach(), y, LAMBDA) - fused_gradient(z.detach(), y, 0.0)) / count_of(y)
    if z.requires_grad:
        z.register_hook(lambda grad: grad + source)
    return ce(z, y)


# Losses outside the family.


def unlikelihood(z: Tensor, y: Tensor) -> Tensor:
    """CE − 0.1 log(1 − p) of the previous target, where that is another class."""
    previous = F.pad(y, (1, 0), value=IGNORE)[:-1]
    repeats = valid_of(previous) & (previous != y)
    p = pick(torch.softmax(wide(z), -1), previous)
    penalty = -torch.log((1 - p).clamp(min=1e-5))
    return mean(lse(wide(z)) - pick(wide(z), y) + 0.1 * torch.where(repeats, penalty, 0.0), y)


def confidence_penalty(z: Tensor, y: Tensor) -> Tensor:
    """CE − 0.02 H(p) + Z."""
    log_p = F.log_softmax(wide(z), -1)
    return plain(wide(z), y) + 0.02 * mean((log_p.exp() * log_p).sum(-1), y)


def sampled_softmax(z: Tensor, y: Tensor) -> Tensor:
    """The target against every third class, in CE and Z."""
    own = torch.arange(z.shape[-1]) == y.clamp(min=0)[:, None]
    candidates = own | (torch.arange(z.shape[-1]) % 3 == 0)
    return plain(wide(z).masked_fill(~candidates, -math.inf), y)


def one_against_rest(z: Tensor, y: Tensor) -> Tensor:
    """A binary cross-entropy for every class; there is no softmax."""
    onehot = F.one_hot(y.clamp(min=0), z.shape[-1]).to(wide(z).dtype)
    return mean(F.binary_cross_entropy_with_logits(wide(z), onehot, reduction="none").sum(-1), y)


def normalised_logits(z: Tensor, y: Tensor) -> Tensor:
    """The logits of a token are divided by their root mean square and multiplied by 6."""
    z = wide(z)
    return plain(6 * z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6), y)


UNUSUAL = some("unexplained_source")
LINEAR = {"linear": True}
SHIFTED: dict[str, Any] = {"targets": "shifted"}
PER_ITEM: dict[str, Any] = {"ce_scale": 1 / ITEMS}
PADDED = {"valid_vocab": REAL_VOCAB}


def bug(loss: Callable[..., Any], *must: str, **rest: Any) -> Case:
    """A planted bug next to a raw Z over valid tokens, which still has to be named."""
    raw = {"coef": LAMBDA, "target": 0.0, "coordinate": "raw", "ce_denominator": "valid", "z_denominator": "valid"}
    return odd(loss, *must, **raw | rest)


def outside(loss: Callable[..., Any], **rest: Any) -> Case:
    """Not of the family: an open answer, or a Z of another form; named figures have to be true."""
    rest = {"or_open": True} | rest
    return odd(loss, "unexplained_source", **rest)


def smoothed(coef: float) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's label smoothing of 0.1 and a Z over valid tokens."""
    return lambda z, y: ce_sum(z, y, label_smoothing=0.1) / count_of(y) + coef * mean(lse(z) ** 2, y)


def next_token(coef: float, items: int | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: plain(z[:-1], y[1:], coef) * (1 if items is None else int(count_of(y[1:])) / items)


def real_columns(z: Tensor, y: Tensor) -> Tensor:
    return plain(z[:, :REAL_VOCAB], y)


def factorized_formula(z: Tensor, y: Tensor) -> Tensor:
    mu = z.mean(-1)
    return ce(z, y) + LAMBDA * mean(mu**2 + (lse(z) - mu - LOG_V) ** 2, y)


_right: dict[str, Case] = {
    "torchtitan compiled": right(lambda pred, labels: _compiled()(pred, labels), 1e-4),
    "Megatron layout": right(megatron_layout, 1e-4),
    "OLMo-core head": right(OlmoHead(2e-4, 512.0), 2e-4 / 512, by=("sum", "sum"), more={"ce_scale": 1 / 512}),
    "levanter roll and mask": right(next_token_by_roll, 5e-4, more=SHIFTED, formula=next_token(5e-4)),
    "Liger linear with smoothing": right(
        liger_linear, 1e-4, options=LINEAR, more={"label_smoothing": 0.1}, formula=smoothed(1e-4)
    ),
    "flash-attn module": right(
        FLASH, 1e-4, options={"per_token": FLASH.rows, "logit_scale": 0.5}, formula=lambda z, y: plain(z / 2, y, 1e-4)
    ),
    "HF loss with num_items": right(
        functools.partial(causal_lm_loss, num_items_in_batch=ITEMS),
        1e-4 / ITEMS,
        by=("sum", "sum"),
        more=PER_ITEM | SHIFTED,
        formula=next_token(1e-4, ITEMS),
    ),
    "HF label smoother": right(LabelSmoother(), more={"label_smoothing": 0.1}, formula=smoothed(LAMBDA)),
    "fairseq criterion": right(fairseq_criterion, by=("sum", "sum")),
    "sum per sequence": right(sum_per_sequence, 8 * LAMBDA, by=("all", "all"), more={"ce_scale": 8.0}),
    "relative part from log p": right(relative_from_log_p, LAMBDA, LOG_V, "centered", more={"target_rule": "log_v"}),
    "factorized by hand": right(factorized, target=LOG_V, formula=factorized_formula),
    "gain-aware by hand": right(
        gain_aware, may=some("forward_backward_mismatch"), options=LINEAR, formula=gain_formula
    ),
    "learned temperature": right(
        LearnedTemperature(), 2e-4, options={"logit_scale": 2.0}, formula=lambda z, y: plain(2 * z, y, 2e-4)
    ),
    "padding bias": right(padding_bias, options=PADDED, formula=real_columns),
    "config with a default": right(ZConfig(2e-3).build(), 2e-3, options={"off": ZConfig(0.0).build()}),
    "vmapped token loss": right(vmapped, 3e-4, 1.5),
    "blocks of columns": right(blocked(tail=True)),
    "KL to uniform": Case(
        kl_to_uniform,
        False,
        0.0,
        may=some("forward_backward_mismatch"),
        formula=lambda z, y: 1.05 * ce_sum(z, y, label_smoothing=0.05 / 1.05) / count_of(y),
    ),
    "TRL chunked": right(trl_chunked, 2e-4, more=SHIFTED, formula=next_token(2e-4)),
}
for _name in ("factorized by hand", "gain-aware by hand"):  # a word for their coordinate is not claimed
    _right[_name] = replace(_right[_name], coordinate=None)

_bugs: dict[str, Case] = {
    "return_z_loss is not an off switch": bug(reporting(True), "not_off", options={"off": reporting(False)}),
    "maximum of the batch": odd(
        batch_maximum,
        or_open=True,
        one_of=UNUSUAL | some("max_shifted"),
        may=some("forward_backward_mismatch", "size_dependent", "all_ignored_nonfinite"),
    ),
    "num_items in CE only": bug(
        lambda z, y: ce_sum(wide(z), y) / ITEMS + 1e-4 * mean(lse(wide(z)) ** 2, y),
        "denominator_mismatch",
        coef=1e-4,
        ce_denominator="sum",
        more=PER_ITEM,
    ),
    "trainer adds the auxiliary": bug(
        adds_auxiliary,
        "counted_twice",
        options={"expect": {"coef": LAMBDA, "target": "log_v"}},
        coef=2 * LAMBDA,
        target=LOG_V,
    ),
    "count not clamped": bug(
        lambda z, y: (ce_sum(wide(z), y) + 1e-4 * z_sum(wide(z), y, 2.0)) / (y != IGNORE).sum(),
        "all_ignored_nonfinite",
        coef=1e-4,
        target=2.0,
    ),
    "logs λ twice": bug(weighs_the_log_again, coef=2e-2),
    "upstream on CE only": bug(functools.partial(kernel, coef=LAMBDA, ce_only=True), "upstream_ignored"),
    "trains class 0": odd(
        trains_class_zero,
        "ignored_tokens_leak",
        or_open=True,
        coef=LAMBDA,
        may=UNUSUAL | some("all_ignored_nonfinite"),
        formula=lambda z, y: plain(z, y.clamp(min=0)),
    ),
    "padding masked in place": bug(masks_padding_in_place, "overwrites_input", options=PADDED, formula=real_columns),
    "Z of a returned log Z": odd(
        z_of_returned_lse, "zero_gradient_z", has_z=False, coef=0.0, may=some("forward_backward_mismatch"), formula=ce
    ),
    "gradient kept in bf16": bug(
        functools.partial(kernel, coef=LAMBDA, stored=torch.bfloat16),
        "low_precision_source",
        or_open=True,
        tolerance=1e-2,
        may=UNUSUAL | some("forward_backward_mismatch"),
    ),
    "backward without the last columns": odd(
        blocked(tail=False),
        "forward_backward_mismatch",
        or_open=True,
        may=UNUSUAL | some("filtered_source", "size_dependent"),
    ),
    "injected by a hook": bug(injected_by_hook, "forward_backward_mismatch", "upstream_ignored"),
}

OUTSIDE: dict[str, Case] = {
    "sigmoid cap": Case(
        lambda z, y: plain(23 * torch.sigmoid((wide(z) + 5) / 7.5), y),
        True,
        LAMBDA,
        0.0,
        or_open=True,
        may=UNUSUAL | some("filtered_source"),
        formula=lambda z, y: plain(11.5 + 11.5 * torch.tanh((z + 5) / 15), y),
    ),
    "unlikelihood": outside(unlikelihood, has_z=None, or_false=True),
    "confidence penalty and Z": outside(
        confidence_penalty,
        coef=LAMBDA,
        target=0.0,
        formula=lambda z, y: plain(z, y) - 0.02 * mean(torch.distributions.Categorical(logits=z).entropy(), y),
    ),
    "Z and max-z": outside(
        lambda z, y: plain(wide(z), y) + 2e-4 * mean(wide(z).amax(-1) ** 2, y),
        coef=LAMBDA,
        target=0.0,
        formula=lambda z, y: plain(z, y) + 2e-4 * mean(z.topk(1).values.squeeze(-1).square(), y),
    ),
    "sampled softmax": outside(sampled_softmax, may=some("filtered_source", "size_dependent")),
    "one against rest": outside(one_against_rest, has_z=None, or_false=True),
    "normalised logits": outside(normalised_logits),
}

UNSEEN: dict[str, Case] = _right | _bugs | OUTSIDE
