"""What a loss of (hidden, weight, target) trains when its inputs have 16 bits, as they have in training.

The row sum Σ_v δ_v of a token's source is that of its objective: 2λ(log Z − c) for a raw Z, 0 for cross-entropy and a centered Z.
A column of ones in the head, which no hidden state uses, brings it out in dh, where it is rounded once. Three causes of another
row sum differ in where they show: entries that are dropped, on flat heads; a log Z that is not that of the logits of the backward
pass, more with larger logits; tokens without a gradient, where the model is confident.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.calls import LossCallError
from zloss.audit.loss.evidence import Evidence, relative
from zloss.audit.loss.probes import Probe, allowed, seeded

DTYPES = (torch.bfloat16, torch.float16)
PEAKS = (20.0, 40.0, 80.0)
"""Sizes of the largest logit; pretrained models have 20 to 40."""
FLAT, FLAT_VOCAB = 0.5, 16384
WIDTH = 72
ROUNDINGS = 3.0
"""A row sum may be off by so many roundings of a source that is stored in 16 bits."""


@dataclass(frozen=True)
class HeadCall:
    """One call on a dense 16-bit head, against fp64 of the same numbers."""

    probe: Probe
    dtype: torch.dtype
    off_T: Tensor
    """Row sum minus that of the objective, relative to the weight on CE; valid tokens."""
    wanted_T: Tensor
    """The row sum of the objective, likewise."""
    limit: float
    """RMS of what rounding the source to 16 bits may bring in."""
    dead_T: Tensor
    """Valid tokens without any gradient at hidden, where the objective has one."""
    weight_error: float
    """‖dW − fp64‖/‖fp64‖."""
    rounded_once: float
    """The same of fp64 rounded to the dtype."""
    narrow: bool
    """The loss itself comes in 16 bits: all of its arithmetic does."""

    @property
    def rms(self) -> float:
        return float(self.off_T.square().mean().sqrt())


def call_head(e: Evidence, dtype: torch.dtype, peak: float, tokens: int, vocab: int) -> HeadCall | None:
    """None if the loss rejects these inputs, or what it should train is not known. Every call is made once."""
    key = (e.seed, dtype, peak, tokens)
    if key not in e.heads:
        e.heads[key] = _call_head(e, dtype, peak, tokens, vocab)
    found: HeadCall | None = e.heads[key]
    return found


def _call_head(e: Evidence, dtype: torch.dtype, peak: float, tokens: int, vocab: int) -> HeadCall | None:
    if not e.loss.linear or not e.plain or e.fitted is None or e.fitted.beta or not e.has_ce or e.space.padded:
        return None
    if e.at(vocab) is None:
        return None
    generator = seeded(e.seed)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(vocab, WIDTH, generator=generator)
    hidden[:, 0], weight[:, 0] = 0.0, 1.0
    weight[:, 1:] *= peak / float((hidden @ weight.T).abs().max())
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()
    logits = hidden @ weight.T
    target = torch.randint(vocab, (tokens,), generator=generator)
    target = torch.where(torch.arange(tokens) % 2 == 0, logits.argmax(-1), target)
    probe = Probe(logits, allowed(target, e.space), vocab, f"16-bit head, largest logit {peak:g}", e.seed, e.space.warp)
    scale = e.fitted.ce / e.count("CE", tokens, tokens)
    # A loss scale keeps the gradients of fp16 inputs in range, as in training.
    up = 2.0 ** -round(math.log2(abs(scale)))
    try:
        value, *grads = e.loss.on_head(hidden, weight, probe.target_T, dtype, upstream=up)
    except LossCallError:
        return None
    grad_hidden, grad_weight = (grad / up for grad in grads)
    total_TV, _ = e.wanted(probe)
    wanted_T, wanted_VD = total_TV.sum(-1), total_TV.T @ hidden
    dead_T = (grad_hidden == 0).all(-1) & ((total_TV @ weight).norm(dim=-1) > 1e-3 * abs(scale))
    unit = torch.finfo(dtype).eps / 2
    return HeadCall(
        probe,
        dtype,
        (grad_hidden[:, 0] - wanted_T) / scale,
        wanted_T / scale,
        ROUNDINGS * unit * float((total_TV.norm(dim=-1) / scale).square().mean().sqrt()),
        dead_T,
        relative(grad_weight, wanted_VD),
        relative((wanted_VD * up).to(dtype).double() / up, wanted_VD),
        value.dtype in DTYPES,
    )


def inconsistent(e: Evidence) -> HeadCall | None:
    """The call whose row sums are furthest off because log Z is not that of the backward pass; None if none is."""
    calls = [call_head(e, dtype, peak, 256, 512) for dtype in DTYPES for peak in PEAKS]
    bad = [one for one in calls if one is not None and one.rms > one.limit and not one.dead_T.any() and not one.narrow]
    return max(bad, key=lambda one: one.rms) if bad and filtered(e) is None else None


def filtered(e: Evidence) -> HeadCall | None:
    """The call in which entries or tokens are left out of the source; None if there is none."""
    for dtype in DTYPES:
        flat = call_head(e, dtype, FLAT, 128, FLAT_VOCAB)
        # What is dropped is missing from every row, and much more than a rounding of log Z.
        least = 4 * torch.finfo(dtype).eps / 2 * math.log(FLAT_VOCAB)
        if flat is not None and not flat.narrow and -float(flat.off_T.mean()) > max(flat.limit, 0.5 * flat.rms, least):
            return flat
        sharp = call_head(e, dtype, PEAKS[-1], 256, 512)
        if sharp is not None and sharp.dead_T.any():
            return sharp
    return None


def accumulated(e: Evidence) -> tuple[HeadCall, HeadCall] | None:
    """(few tokens, many tokens) where dW is further off with many; None if it is not."""
    for dtype in DTYPES:
        few, many = (call_head(e, dtype, 5.0, tokens, 512) for tokens in (64, 2048))
        if few is None or many is None or many.narrow:
            continue
        if many.weight_error > 2.5 * many.rounded_once and many.weight_error > 1.7 * few.weight_error:
            return few, many
    return None


def stored(e: Evidence) -> HeadCall | None:
    """The call that shows logits or all arithmetic in 16 bits; None if they are not."""
    call = call_head(e, DTYPES[0], PEAKS[0], 256, 512)
    return call if call is not None and (call.narrow or call.weight_error > 3 * call.rounded_once) else None
