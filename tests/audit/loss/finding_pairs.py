"""For every finding of the audit one loss that has it and one near miss that does not.

`PAIRS` maps the id of a finding to a `Pair`. The two losses of a pair are as similar in code as possible; a near miss has no
error or warning at all. `test_finding_pairs` checks both sides without the audit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss import faulty, zoo
from tests.audit.loss.faulty import COEF, EXPECT, VALID_VOCAB, correct, straight_through
from tests.audit.loss.zoo import (
    IGNORE,
    Loss,
    by_hand,
    ce,
    fused_gradient,
    gradient_of,
    lse,
    mean,
    of,
    penalty,
    wide,
    zl,
)


@dataclass(frozen=True)
class Pair:
    """A loss with a finding, and a near miss."""

    has: Loss
    misses: Loss
    why: str
    """Why the first loss has the finding."""
    why_not: str
    """Why the second has not."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `audit_loss` for the first loss."""
    near_options: dict[str, Any] | None = None
    """Those for the near miss; None: the same."""
    also: frozenset[str] = frozenset()
    """Further findings that are true of the first loss. The near miss has none."""
    trains: Callable[[Tensor, Tensor], Tensor] = correct
    """A plain loss with the gradient of the near miss."""

    @property
    def options_of_near_miss(self) -> dict[str, Any]:
        return self.options if self.near_options is None else self.near_options


# Near misses, in the order of `PAIRS`.


def detached_maximum_restored(z: Tensor, y: Tensor) -> Tensor:
    top = z.amax(-1).detach()
    return ce(z, y) + COEF * mean((lse(z - top[:, None]) + top) ** 2, y)


def means_of_a_checked_batch(z: Tensor, y: Tensor) -> Tensor:
    valid = y != IGNORE
    if not valid.any():
        return z[:0].sum()
    return F.cross_entropy(z, y) + COEF * lse(z)[valid].square().mean()


def both_over_count_of_all(z: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(z, y, ignore_index=IGNORE, reduction="sum") / y.numel()
    return ce + COEF * lse(z)[y != IGNORE].square().sum() / y.numel()


def maximum_restored(z: Tensor, y: Tensor) -> Tensor:
    top = z.max(dim=-1, keepdim=True).values
    return ce(z, y) + COEF * mean((lse(z - top) + top.squeeze(-1)) ** 2, y)


def with_none_as_default(coef: float | None) -> Loss:
    return lambda z, y: correct(z, y, 1e-4 if coef is None else coef)


def overwrites_a_clone(z: Tensor, y: Tensor) -> Tensor:
    loss = correct(z * 1.0, y)
    work = z.detach().clone()
    with torch.no_grad():
        work.sub_(work.max())
    return loss


def marked_reported_z(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `faulty.silent_reported_z`, but the second output has no gradient."""
    value, grad = gradient_of(lambda x, y: correct(wide(x), y), z, y)
    return by_hand(value, lambda upstream: (upstream * grad,), z), zl(wide(z), y).detach()


def per_token_own_upstream(z: Tensor, y: Tensor) -> Tensor:
    """Gradient in forward; every token's row is multiplied by the upstream gradient of that token."""
    rows, grad = gradient_of(faulty.per_token, z, y)
    return by_hand(rows, lambda upstream: (upstream[:, None] * grad,), z)


def probabilities_in_the_log(z: Tensor, y: Tensor) -> dict[str, Any]:
    confidence = torch.softmax(z, -1).amax(-1).mean()
    return {"loss": correct(z, y), "confidence": float(confidence.detach())}


def shifted_exponential(z: Tensor, y: Tensor) -> Tensor:
    top = z.detach().amax(-1, keepdim=True)
    return ce(z, y) + COEF * mean(((z - top).exp().sum(-1).log() + top.squeeze(-1)).square(), y)


def drops_zeros_only(z: Tensor, y: Tensor) -> Tensor:
    """As `faulty.filtered`, but entries are compared with 0 and after the Z source has been added."""
    x = wide(z.detach())
    grad = fused_gradient(x, y, COEF) / (y != IGNORE).sum().clamp(min=1)
    kept = torch.where(grad.abs() > 0, grad, 0.0)
    return by_hand(correct(x, y), lambda upstream: (upstream * kept,), z)


def softcap_before_masking(z: Tensor, y: Tensor) -> Tensor:
    lanes = torch.arange(z.shape[-1]) >= VALID_VOCAB
    return correct((30 * torch.tanh(z / 30)).masked_fill(lanes, -math.inf), y)


def tail_counted_once(z: Tensor, y: Tensor) -> Tensor:
    block = 20000
    blocks = [z[:, :block]]
    if z.shape[-1] > block:
        blocks.append(z[:, block:])
    return ce(z, y) + zl(torch.cat(blocks, -1), y)


def rolled_with_mask(z: Tensor, y: Tensor) -> Tensor:
    labels = y.roll(-1)
    labels[-1] = IGNORE
    return zoo.plain(z, labels)


def parts(*, added: bool) -> Loss:
    """`loss` contains the Z, or leaves it to the caller."""

    def loss(z: Tensor, y: Tensor) -> dict[str, Tensor]:
        nats, part = ce(wide(z), y), zl(wide(z), y)
        return {"loss": nats + part, "z_loss": part.detach()} if added else {"loss": nats, "z_loss": part}

    return loss


def z_over_masked_tokens(z: Tensor, y: Tensor) -> Tensor:
    valid = y != IGNORE
    return ce(z, y) + COEF * torch.where(valid, lse(z).square(), 0.0).sum() / valid.sum().clamp(min=1)


def around(c: float) -> Loss:
    return lambda z, y: correct(z, y, c=c)


PAIRS: dict[str, Pair] = {
    "zero_gradient_z": Pair(
        faulty.detached_z,
        detached_maximum_restored,
        "Z is of detached logits",
        "only the maximum is detached, and it is restored",
        also=frozenset({"forward_backward_mismatch"}),
    ),
    "low_precision_source": Pair(
        faulty.bf16_logits,
        lambda z, y: correct(z.float(), y),
        "logits rounded to 8 bits",
        "logits rounded to 24 bits",
        also=frozenset({"forward_backward_mismatch"}),
    ),
    "forward_backward_mismatch": Pair(
        of(straight_through(0.5)), of(straight_through(1.0)), "half the gradient of the value", "its whole gradient"
    ),
    "all_ignored_nonfinite": Pair(
        faulty.zero_over_zero, means_of_a_checked_batch, "0/0 without valid tokens", "an empty batch is caught first"
    ),
    "denominator_mismatch": Pair(
        faulty.z_over_count_of_all,
        both_over_count_of_all,
        "Z over all tokens, CE over valid ones",
        "both over all tokens",
        trains=lambda z, y: correct(z, y) * (y != IGNORE).sum() / y.numel(),
    ),
    "max_shifted": Pair(
        faulty.max_never_restored, maximum_restored, "the row maximum stays subtracted", "it is added again"
    ),
    "not_off": Pair(
        faulty.with_or_default(COEF),
        with_none_as_default(COEF),
        "`0.0 or 1e-4` is 1e-4",
        "only None stands for the default",
        {"off": faulty.with_or_default(0.0)},
        {"off": with_none_as_default(0.0)},
    ),
    "counted_twice": Pair(
        faulty.z_added_again,
        lambda z, y: ce(z, y) + zl(z, y, COEF / 2) + zl(z, y, COEF / 2),
        "Z is added twice",
        "half of λ is added twice",
        {"expect": EXPECT},
    ),
    "overwrites_input": Pair(faulty.overwrites, overwrites_a_clone, "changes the logits", "changes a clone"),
    "reported_z_dtype": Pair(
        faulty.reported_in_input_dtype,
        lambda z, y: (correct(wide(z), y), zl(wide(z), y).detach()),
        "bf16 logits get a Z in bf16",
        "the reported Z is fp32",
    ),
    "reported_z_no_gradient": Pair(
        faulty.silent_reported_z,
        marked_reported_z,
        "the reported Z requires a gradient and has none",
        "it is marked as not differentiable",
        also=frozenset({"reported_z_dtype"}),
    ),
    "reported_z_value": Pair(
        faulty.logs_a_layer_mean,
        lambda z, y: (correct(wide(z), y), zl(wide(z), y).detach() / COEF),
        "a sixteenth of the trained Z",
        "the trained Z over λ, as is common in logs",
        also=frozenset({"reported_z_dtype"}),
    ),
    "upstream_ignored": Pair(
        correct,
        correct,
        "the upstream gradients of the tokens are averaged",
        "each token has its own",
        {"per_token": faulty.per_token_mean_upstream},
        {"per_token": per_token_own_upstream},
    ),
    "probabilities_not_logits": Pair(
        faulty.z_of_probabilities, probabilities_in_the_log, "logsumexp of the softmax", "the softmax is only logged"
    ),
    "overflow": Pair(faulty.naive_exponential, shifted_exponential, "exp of raw logits", "the maximum goes first"),
    "filtered_source": Pair(
        faulty.filtered,
        drops_zeros_only,
        "entries with |p − y| below 2⁻¹² are dropped with their Z source",
        "only entries whose whole gradient is 0 are dropped",
        also=frozenset({"forward_backward_mismatch", "unexplained_source"}),
    ),
    "padding_in_log_z": Pair(
        faulty.softcap_after_masking,
        softcap_before_masking,
        "the cap turns −inf into −30",
        "the mask comes after the cap",
        {"valid_vocab": VALID_VOCAB},
        trains=lambda z, y: correct(30 * torch.tanh(z[:, :VALID_VOCAB] / 30), y),
    ),
    "unexplained_source": Pair(
        faulty.hinge,
        penalty(lambda v: (v - 10).abs() ** 2),
        "relu(log Z − 10)² is one-sided",
        "|log Z − 10|² is the square",
        trains=around(10.0),
    ),
    "not_squared": Pair(penalty(lambda v: v), penalty(lambda v: v * v), "λ log Z", "λ log Z · log Z"),
    "size_dependent": Pair(
        faulty.tail_counted_twice, tail_counted_once, "the second block overlaps the first", "it starts where that ends"
    ),
    "targets_moved": Pair(
        zoo.rolled,
        rolled_with_mask,
        "the last row is trained on target 0",
        "the last row is ignored, which is an ordinary shift",
        trains=lambda z, y: correct(z[:-1], y[1:]),
    ),
    "returned_values": Pair(
        parts(added=False), parts(added=True), "`loss` is CE, and `z_loss` has a gradient", "`loss` contains the Z"
    ),
    "negative_coefficient": Pair(
        faulty.wrong_sign, lambda z, y: ce(z, y) - zl(z, y, -COEF), "CE − λ log² Z", "CE − (−λ) log² Z"
    ),
    "ignored_tokens_leak": Pair(
        faulty.z_over_all_tokens,
        z_over_masked_tokens,
        "Z has no mask",
        "Z is masked",
        also=frozenset({"denominator_mismatch", "all_ignored_nonfinite"}),
    ),
    "differs_from_expected": Pair(
        correct,
        around(3.0),
        "c is 0 instead of 3",
        "c is 3",
        {"expect": {"coef": COEF, "target": 3.0}},
        trains=around(3.0),
    ),
    "not_repeatable": Pair(
        faulty.dropout,
        lambda z, y: correct(F.dropout(z, 0.1, training=False), y),
        "dropout on the logits",
        "dropout that is switched off",
    ),
}
