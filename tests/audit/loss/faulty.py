"""Small faulty losses, one per trap seen in the field, and more that nobody has listed.

Every entry of `FAULTY` is (loss, options of the audit, the ids that must be named).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss.zoo import by_hand, gradient_of

COEF = 1e-3
IGNORE = -100


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over valid tokens; 0 on an all-ignored batch."""
    return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum") / (target != IGNORE).sum().clamp(min=1)


def mean_valid(per_token: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    return per_token[valid].sum() / valid.sum().clamp(min=1)


def z_part(logits: Tensor, target: Tensor, coef: float = COEF, c: float = 0.0) -> Tensor:
    return coef * mean_valid((torch.logsumexp(logits, -1) - c) ** 2, target)


def correct(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits, target)


def only_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target)


# The traps.


def max_never_restored(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    return cross_entropy(logits, target) + z_part(shifted, target)


def max_detached_never_restored(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits - logits.amax(dim=-1, keepdim=True).detach()
    return cross_entropy(logits, target) + z_part(shifted, target)


def with_or_default(coef: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target) + z_part(logits, target, coef or 1e-4)

    return loss


def z_added_again(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits, target) + z_part(logits, target)


def z_over_all_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * torch.logsumexp(logits, -1).square().mean()


def z_over_count_of_all(logits: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    return cross_entropy(logits, target) + COEF * torch.logsumexp(logits, -1)[valid].square().sum() / target.numel()


def zero_over_zero(logits: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    return F.cross_entropy(logits, target) + COEF * torch.logsumexp(logits, -1)[valid].square().mean()


def mask_by_multiplication(logits: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    z = (torch.logsumexp(logits, -1).square() * valid).sum() / valid.sum().clamp(min=1)
    return cross_entropy(logits, target) + COEF * z


def silent_reported_z(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A fused loss whose second output claims a gradient and drops it."""
    value, grad = gradient_of(correct, logits, target)
    outputs = value, z_part(logits.detach(), target)
    return by_hand(outputs, lambda upstream, _: (upstream * grad,), logits)


def reported_in_input_dtype(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    fp32 = logits if logits.dtype == torch.float64 else logits.float()
    return correct(fp32, target), z_part(fp32, target).detach().to(logits.dtype)


def filtered(logits: Tensor, target: Tensor) -> Tensor:
    """p − y + Z with entries of small |p − y| dropped."""
    z, valid = logits.detach(), target != IGNORE
    log_z = torch.logsumexp(z, -1, keepdim=True)
    p = torch.exp(z - log_z)
    onehot = F.one_hot(target.clamp(min=0), z.shape[-1])
    kept = (p - onehot).abs() > 2**-12
    grad = torch.where(kept & valid[:, None], p - onehot + 2 * COEF * log_z * p, torch.zeros_like(p))
    grad = grad / valid.sum().clamp(min=1)
    return by_hand(correct(z, target), lambda upstream: (upstream * grad,), logits)


VALID_VOCAB = 80


def softcap_after_masking(logits: Tensor, target: Tensor) -> Tensor:
    lanes = torch.arange(logits.shape[-1]) >= VALID_VOCAB
    capped = 30 * torch.tanh(logits.masked_fill(lanes, -math.inf) / 30)
    return correct(capped, target)


def padding_ignored(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits, target)


def padding_masked(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits[:, :VALID_VOCAB], target)


def softcap_derivative_missing(logits: Tensor, target: Tensor) -> Tensor:
    return correct(by_hand(30 * torch.tanh(logits.detach() / 30), lambda upstream: (upstream,), logits), target)


def _per_token(logits: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    rows = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
    return rows + COEF * torch.where(valid, torch.logsumexp(logits, -1), 0.0) ** 2


def per_token(logits: Tensor, target: Tensor) -> Tensor:
    return _per_token(logits, target)


def per_token_mean_upstream(logits: Tensor, target: Tensor) -> Tensor:
    """Gradient in forward; a per-token upstream gradient is replaced by its mean."""
    rows, grad = gradient_of(_per_token, logits, target)
    return by_hand(rows, lambda upstream: (upstream.mean() * grad,), logits)


def upstream_ignored(logits: Tensor, target: Tensor) -> Tensor:
    value, grad = gradient_of(correct, logits, target)
    return by_hand(value, lambda upstream: (grad,), logits)


def logs_a_layer_mean(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return correct(logits, target), z_part(logits, target).detach() / 16


def z_of_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(torch.softmax(logits, -1), target)


def naive_exponential(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(logits.exp().sum(-1).log().square(), target)


# Not in the list.


def wrong_sign(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) - z_part(logits, target)


def detached_z(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits.detach(), target)


def z_of_log_softmax(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(torch.log_softmax(logits, -1), target, c=5.0)


def clipped(logits: Tensor, target: Tensor) -> Tensor:
    log_z = torch.logsumexp(logits, -1).clamp(max=20.0)
    return cross_entropy(logits, target) + COEF * mean_valid(log_z**2, target)


def clipped_beyond_ordinary(logits: Tensor, target: Tensor) -> Tensor:
    log_z = torch.logsumexp(logits, -1).clamp(max=100.0)
    return cross_entropy(logits, target) + COEF * mean_valid(log_z**2, target)


def temperature_in_z(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits / 1.3, target)


def square_of_the_mean(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(torch.logsumexp(logits, -1), target) ** 2


def maximum_for_logsumexp(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(logits.max(-1).values ** 2, target)


def straight_through_factor(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits.detach() + 0.5 * (logits - logits.detach()), target)


def straight_through_z(logits: Tensor, target: Tensor) -> Tensor:
    scaled = logits.detach() + 2.0 * (logits - logits.detach())
    return cross_entropy(logits, target) + z_part(scaled, target)


def another_value(logits: Tensor, target: Tensor) -> Tensor:
    loss = correct(logits, target)
    return loss + (cross_entropy(logits, target) - loss).detach()


def constant_offset(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits, target) + 1.0


def bf16_logits(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits.bfloat16().float(), target)


def bf16_logits_in_z(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits.bfloat16().float(), target)


def fp16_logits(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits.half().float(), target)


def bf16_arithmetic(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits.bfloat16(), target)


def bf16_arithmetic_in_z(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits.bfloat16(), target).to(logits.dtype)


def overwrites(logits: Tensor, target: Tensor) -> Tensor:
    loss = correct(logits * 1.0, target)
    with torch.no_grad():
        logits.sub_(logits.max())
    return loss


def noisy(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits + 0.05 * torch.randn_like(logits), target)


def dropout(logits: Tensor, target: Tensor) -> Tensor:
    return correct(F.dropout(logits, 0.1), target)


class Warming:
    """λ grows with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(logits, target) + self.calls * z_part(logits, target)


def linear_penalty(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(torch.logsumexp(logits, -1).abs(), target)


def fourth_power(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(torch.logsumexp(logits, -1) ** 4, target)


def one_lane_missing(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits[:, 1:], target)


def half_detached(logits: Tensor, target: Tensor) -> Tensor:
    log_z = torch.logsumexp(logits, -1)
    return cross_entropy(logits, target) + COEF * mean_valid(log_z * log_z.detach(), target)


def tail_counted_twice(logits: Tensor, target: Tensor) -> Tensor:
    block = 20000
    blocks = [logits[:, :block]]
    if logits.shape[-1] > block:
        blocks.append(logits[:, -block:])
    return cross_entropy(logits, target) + z_part(torch.cat(blocks, -1), target)


def first_token_only(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * torch.logsumexp(logits[0], -1).square()


def focal(logits: Tensor, target: Tensor) -> Tensor:
    rows = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
    return mean_valid((1 - torch.exp(-rows)) ** 2 * rows, target)


def centered_by_detached_mean(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits - logits.mean(-1, keepdim=True).detach(), target)


def rewrites_ignored_targets(logits: Tensor, target: Tensor) -> Tensor:
    valid = target != IGNORE
    target[~valid] = 0
    rows = F.cross_entropy(logits, target, reduction="none") + COEF * torch.logsumexp(logits, -1) ** 2
    return rows[valid].sum() / valid.sum().clamp(min=1)


def doubles_hidden(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    hidden.mul_(2)
    return correct(hidden @ weight.T, target)


def clamped_z_gradient(logits: Tensor, target: Tensor) -> Tensor:
    log_z = torch.logsumexp(logits, -1)
    log_z.register_hook(lambda gradient: gradient.clamp(-1e-5, 1e-5))
    return cross_entropy(logits, target) + COEF * mean_valid(log_z**2, target)


def coefficient_over_vocabulary(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + z_part(logits, target) / logits.shape[-1]


def z_of_ignored_tokens(logits: Tensor, target: Tensor) -> Tensor:
    ignored = target == IGNORE
    z = torch.logsumexp(logits, -1)[ignored].square().sum() / ignored.sum().clamp(min=1)
    return cross_entropy(logits, target) + COEF * z


def hinge(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + COEF * mean_valid(F.relu(torch.logsumexp(logits, -1) - 10) ** 2, target)


def bf16_loss(logits: Tensor, target: Tensor) -> Tensor:
    return correct(logits, target).bfloat16()


def bf16_product(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return correct((hidden.bfloat16() @ weight.bfloat16().T).float(), target)


def half_of_a_long_batch_flipped(logits: Tensor, target: Tensor) -> Tensor:
    tokens, valid = target.numel(), target != IGNORE
    token_loss = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
    token_loss = token_loss + COEF * torch.where(valid, torch.logsumexp(logits, -1).square(), 0)
    flipped = (torch.arange(tokens) >= tokens // 2) & (tokens >= 256)
    return torch.where(flipped, -token_loss, token_loss).sum() / valid.sum().clamp(min=1)


EXPECT = {"coef": COEF, "target": 0.0}

TRAPS: dict[str, tuple[Callable[..., Any], dict[str, Any], set[str]]] = {
    "1 max never restored": (max_never_restored, {}, {"max_shifted"}),
    "1 detached max never restored": (max_detached_never_restored, {}, {"max_shifted"}),
    "2 coef or default": (with_or_default(COEF), {"off": with_or_default(0.0)}, {"not_off"}),
    "2 coef or default, None": (with_or_default(COEF), {"off": with_or_default(None)}, {"not_off"}),
    "3 counted twice": (z_added_again, {"expect": EXPECT}, {"counted_twice"}),
    "4 Z over all tokens": (z_over_all_tokens, {}, {"denominator_mismatch", "ignored_tokens_leak"}),
    "4 Z over the count of all": (z_over_count_of_all, {}, {"denominator_mismatch"}),
    "5 zero over zero": (zero_over_zero, {}, {"all_ignored_nonfinite"}),
    "5 inf times 0": (mask_by_multiplication, {}, {"all_ignored_nonfinite"}),
    "6 silent reported Z": (silent_reported_z, {}, {"reported_z_no_gradient"}),
    "7 reported in bf16": (reported_in_input_dtype, {}, {"reported_z_dtype"}),
    "8 filtered": (filtered, {}, {"filtered_source"}),
    "9 softcap after masking": (softcap_after_masking, {"valid_vocab": VALID_VOCAB}, {"padding_in_log_z"}),
    "9 padding never masked": (padding_ignored, {"valid_vocab": VALID_VOCAB}, {"padding_in_log_z"}),
    "9 softcap derivative missing": (softcap_derivative_missing, {}, {"forward_backward_mismatch"}),
    "10 per-token upstream": (correct, {"per_token": per_token_mean_upstream}, {"upstream_ignored"}),
    "10 scalar upstream": (upstream_ignored, {}, {"upstream_ignored"}),
    "11 logged is not trained": (logs_a_layer_mean, {}, {"reported_z_value"}),
    "12 probabilities": (z_of_probabilities, {}, {"probabilities_not_logits"}),
    "12 naive exponential": (naive_exponential, {}, {"overflow"}),
    "13 tail counted twice": (tail_counted_twice, {}, {"size_dependent"}),
}

UNLISTED: dict[str, tuple[Callable[..., Any], dict[str, Any], set[str]]] = {
    "wrong sign": (wrong_sign, {}, {"negative_coefficient"}),
    "detached Z": (detached_z, {}, {"zero_gradient_z"}),
    "Z of log-softmax": (z_of_log_softmax, {}, {"zero_gradient_z"}),
    "no Z although expected": (only_cross_entropy, {"expect": EXPECT}, {"zero_gradient_z"}),
    "clipped": (clipped, {}, {"unexplained_source"}),
    "clipped beyond ordinary": (clipped_beyond_ordinary, {}, {"unexplained_source"}),
    "temperature": (temperature_in_z, {}, {"unexplained_source"}),
    "square of the mean": (square_of_the_mean, {}, {"unexplained_source"}),
    "maximum": (maximum_for_logsumexp, {}, {"unexplained_source"}),
    "straight-through factor": (straight_through_factor, {}, {"forward_backward_mismatch"}),
    "straight-through Z": (straight_through_z, {}, {"forward_backward_mismatch"}),
    "another value": (another_value, {}, {"forward_backward_mismatch"}),
    "constant offset": (constant_offset, {}, {"forward_backward_mismatch"}),
    "bf16 logits": (bf16_logits, {}, {"low_precision_source"}),
    "bf16 logits in Z": (bf16_logits_in_z, {}, {"low_precision_source"}),
    "fp16 logits": (fp16_logits, {}, {"low_precision_source"}),
    "bf16 arithmetic": (bf16_arithmetic, {}, {"low_precision_source"}),
    "bf16 arithmetic in Z": (bf16_arithmetic_in_z, {}, {"low_precision_source"}),
    "overwrites": (overwrites, {}, {"overwrites_input"}),
    "noise": (noisy, {}, {"not_repeatable"}),
    "dropout": (dropout, {}, {"not_repeatable"}),
    "state": (Warming(), {}, {"not_repeatable"}),
    "linear penalty": (linear_penalty, {}, {"unexplained_source"}),
    "fourth power": (fourth_power, {}, {"unexplained_source"}),
    "one lane missing": (one_lane_missing, {}, {"unexplained_source"}),
    "half detached": (half_detached, {}, {"forward_backward_mismatch"}),
    "first token only": (first_token_only, {}, {"unexplained_source"}),
    "focal": (focal, {}, set()),
    "centered by a detached mean": (centered_by_detached_mean, {}, {"unexplained_source"}),
    "rewrites ignored targets": (rewrites_ignored_targets, {}, {"overwrites_input"}),
    "doubles hidden": (doubles_hidden, {"linear": True}, {"overwrites_input"}),
    "clamped Z gradient": (clamped_z_gradient, {}, {"forward_backward_mismatch", "unexplained_source"}),
    "λ over V": (coefficient_over_vocabulary, {}, {"size_dependent"}),
    "half of a long batch flipped": (half_of_a_long_batch_flipped, {}, {"size_dependent"}),
    "Z of ignored tokens": (z_of_ignored_tokens, {}, {"ignored_tokens_leak"}),
    "hinge": (hinge, {}, {"unexplained_source"}),
    "bf16 loss": (bf16_loss, {}, {"reported_z_dtype"}),
    "bf16 product": (bf16_product, {"linear": True}, {"low_precision_source"}),
    "wrong c": (correct, {"expect": {"coef": COEF, "target": 3.0}}, {"differs_from_expected"}),
    "wrong λ": (correct, {"expect": {"coef": 0.7 * COEF}}, {"differs_from_expected"}),
    "wrong denominator": (correct, {"expect": {"denominator": "sum"}}, {"denominator_mismatch"}),
}

ALSO_TRUE: dict[str, set[str]] = {
    # The gradient of a detached or filtered part is not the derivative of the value; a penalty that is no known one is
    # unexplained too; whatever draws random numbers or keeps state disturbs other questions.
    "1 detached max never restored": {"forward_backward_mismatch"},
    "6 silent reported Z": {"reported_z_dtype"},
    "8 filtered": {"forward_backward_mismatch"},
    "9 softcap derivative missing": {"unexplained_source"},
    "11 logged is not trained": {"reported_z_dtype"},
    "12 probabilities": {"unexplained_source"},
    "detached Z": {"forward_backward_mismatch"},
    "bf16 arithmetic": {"reported_z_dtype"},
    "bf16 arithmetic in Z": {"forward_backward_mismatch"},
    "noise": {"unexplained_source"},
    "dropout": {"unexplained_source"},
    "state": {"forward_backward_mismatch", "unexplained_source", "upstream_ignored"},
    "clamped Z gradient": {"upstream_ignored"},
    "centered by a detached mean": {"forward_backward_mismatch"},
}
