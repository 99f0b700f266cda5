"""The same loss at other sizes: many tokens, many counted tokens, large vocabularies. Bugs in tails of blocks live there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, LossCallError
from zloss.audit.loss.identify import Identification, factors
from zloss.audit.loss.probes import Probe, Space, draw, seeded
from zloss.audit.loss.source import RAW, ROUNDING, decompose

LIMIT = 2e-2
"""Error of a token, relative to its Z source (to its gradient where there is no Z), that is a finding."""
TOKENS = (130, 1000, 1024)
COUNTED, OF = 2049, 2100
"""Counted tokens, and all tokens of their batch: 2049 is the first count that neither fp16 nor bf16 holds."""
COUNT_LIMIT = 1e-4
"""Error of a denominator that is a finding; 2049 in 16 bits is off by 5e-4."""
VOCABS = (5000, 9000, 20000, 33000, 70001, 131071, 131072)
"""Beyond one block, and beyond twice as much, for blocks of 4096 to 65536; the last one is a multiple of them all."""
ROWS = 6
"""Tokens at a large vocabulary."""
BUDGET = 12.0
"""Time for all sizes, in seconds; sizes that a slow loss does not reach are reported as not tried."""
BOTH = ((1000, 33000), (300, 131071))
"""Tokens and vocabulary at once, with `thorough`."""
SPECIAL = frozenset({0, 1, 2, 3, 50256, 50257})
"""Ids of special tokens that a loss may ignore; no targets at a large vocabulary."""


@dataclass(frozen=True)
class SizeTried:
    """One size and what it gave."""

    shape: tuple[int, int]
    masked: bool
    verdict: Literal["same", "differs", "refused", "left_out"] = "left_out"
    sentence: str = ""
    figure: float | None = None

    @property
    def words(self) -> str:
        tokens, vocab = self.shape
        return f"T = {tokens:,}, V = {vocab:,}" + (", part of the tokens ignored" if self.masked else "")


def try_sizes(
    box: BlackBox, ident: Identification, seed: int, *, thorough: bool, only: tuple[SizeTried, ...] | None = None
) -> tuple[SizeTried, ...]:
    """Every size within the time budget, or only some of them, compared with what the small probes identified."""
    if not ident.known or ident.how not in ("none", "explained") or ident.coarse:
        return ()
    wanted = None if only is None else {one.words for one in only}
    started, rate, out = time.perf_counter(), 0.0, []
    for space, masked in _sizes(ident, thorough):
        one, entries = SizeTried((space.tokens, space.width), masked), space.tokens * space.width
        if wanted is not None and one.words not in wanted:
            continue
        begun = time.perf_counter()
        if thorough or begun - started + rate * entries <= BUDGET:
            one = SizeTried(one.shape, masked, *_try(box, ident, space, masked, seed))
            # Building and comparing a probe counts as well.
            rate = max(rate, (time.perf_counter() - begun) / entries) if entries > 5000 else rate
        out.append(one)
    return tuple(out)


def _sizes(ident: Identification, thorough: bool) -> Iterator[tuple[Space, bool]]:
    """(size, whether part of the tokens is ignored)."""
    space = ident.space
    for tokens in TOKENS:
        yield replace(space, tokens=tokens), False
    if ident.trusted and ident.identified.ce_weights != "groups":
        yield replace(space, tokens=OF if ident.masks_predicted else COUNTED), ident.masks_predicted
    if space.padded or ident.identified.target_rule == "other":
        return
    for tokens, vocab in (*((ROWS, vocab) for vocab in VOCABS), *(BOTH if thorough else ())):
        yield replace(space.with_vocab(vocab), tokens=tokens, avoid=space.avoid | SPECIAL), False


Answer = tuple[Literal["same", "differs", "refused"], str, float | None]


def _try(box: BlackBox, ident: Identification, space: Space, masked: bool, seed: int) -> Answer:
    probe = draw("mixed", space, seed + 5)
    # Every class is a target once where the rows suffice.
    if space.tokens >= 2 * space.lanes:
        classes = probes.allowed(torch.arange(space.tokens) % space.lanes, space.lanes, space.avoid)
        probe = replace(probe, target_T=torch.where(torch.arange(space.tokens) % 2 == 1, classes, probe.target_T))
    if masked:
        keep = torch.ones(space.tokens, dtype=torch.bool)
        keep[torch.randperm(space.tokens, generator=seeded(seed + 5))[COUNTED:]] = False
        probe = probe.masked(keep)
    try:
        outcome = box(probe)
    except LossCallError as error:
        return "refused", str(error), None
    if not outcome.finite:
        return "differs", "loss or gradient is not finite", None
    if not ident.trusted or ident.identified.extra.keys() & {"shift_coef", "beta"}:
        return _inside_shapes(ident, probe, outcome.grad_TV)
    return _compare(ident, probe, outcome.grad_TV)


def _inside_shapes(ident: Identification, probe: Probe, grad_TV: Tensor) -> Answer:
    """Where token weights or gains make prediction impossible: every row must still be made of the known shapes."""
    rows = decompose([(probe, grad_TV)], ident.eps, warp=ident.model.warp, fourth=ident.rows.fourth)
    bad = probe.valid_T & rows.solved_T & ~rows.inside_T
    silent = probe.valid_T & (grad_TV.norm(dim=-1) == 0)
    if bool(silent.any()) and ident.identified.ce_weights == "uniform":
        return "differs", f"{_tokens(silent)} no gradient", None
    if not bool(bad.any()):
        return "same", "", None
    return "differs", f"{_tokens(bad)} a gradient that is not made of p, onehot(y) and 1/V", None


def _compare(ident: Identification, probe: Probe, grad_TV: Tensor) -> Answer:
    """The gradient against the model: equal, equal up to factors that are known to vary, or different in words."""
    model, got = ident.model, ident.identified
    ce_TV, z_TV, keep = model.ce_source(probe), model.z_source(probe), probe.valid_T

    def errors(wanted_TV: Tensor) -> Tensor:
        """Per token ‖gradient − wanted‖ beyond rounding over ‖Z source‖."""
        # A softmax of V classes sums V rounded terms; a warp is known no better than it was searched.
        spread = max(1.0, math.sqrt(probe.lanes / 96))
        unit = ident.eps if model.warp.identity else max(ident.eps, 1e-7)
        size_T = (ce_TV + z_TV).norm(dim=-1).clamp(min=model.ce_weight(probe))
        beyond_T = (grad_TV - wanted_TV).norm(dim=-1) - ROUNDING * unit * (1.0 + probe.max_T.abs()) * spread * size_T
        scale_T = (z_TV if got.has_z else ce_TV).norm(dim=-1)
        # Where log Z happens to lie at c the Z source vanishes, and any error would be large next to it.
        error_T: Tensor = beyond_T.clamp(min=0) / scale_T.clamp(min=max(1e-2 * float(scale_T.median()), 1e-300))
        return torch.where(keep, error_T, torch.zeros_like(error_T))

    error_T = errors(ce_TV + z_TV)
    figure = float(error_T.max())
    if probe.lanes > ident.space.lanes and model.warp.identity and (where := _tail(ident, probe, grad_TV)):
        return "differs", where, figure
    countable = len(keep) >= 256 and model.warp.identity
    if figure <= LIMIT and not countable:
        return "same", "", figure
    (ce, z), widths = factors(ident, probe, grad_TV)
    if float(errors(ce * ce_TV + z * z_TV).max()) <= LIMIT:
        known = max(COUNT_LIMIT, 1e3 * ident.eps) + 2 * (got.uncertainty.coef_relative or 0.0)
        parts = []
        for part, name, factor, width in zip(
            ("CE", "Z"), (got.ce_denominator, got.z_denominator), (ce, z), widths, strict=True
        ):
            count = model.count(name or "sum", probe)
            # Next to CE in fp32, a Z with a small λ is itself read with an error.
            slack = known + width if countable else LIMIT
            if name not in (None, "other") and abs(factor - 1) > LIMIT:
                parts.append(
                    f"the weight on {part} is {factor:.4g} times what it is on small batches and a small vocabulary"
                )
            elif name not in (None, "other") and count > 1 and abs(factor - 1) > slack:
                parts.append(f"{count:,.0f} tokens are counted as {count / factor:,.1f} in the denominator of {part}")
        return ("differs", "; ".join(parts), figure) if parts else ("same", "", figure if figure <= LIMIT else None)
    # Each row whole, with a separate positive weight: means of groups.
    wanted = ce_TV + z_TV
    w_T = (grad_TV * wanted).sum(-1) / (wanted * wanted).sum(-1).clamp(min=1e-300)
    if float(errors(w_T.unsqueeze(-1) * wanted).max()) <= LIMIT:
        silent = keep & (w_T.abs() < 1e-6) & (wanted.norm(dim=-1) > 1e-6 * float(wanted.norm()))
        flipped = keep & ~silent & (w_T < 0)
        for rows, words in ((silent, "no gradient"), (flipped, "a gradient of the other sign")):
            if bool(rows.any()):
                return "differs", f"{_tokens(rows)} {words}", figure
        return "same", "", None
    return "differs", f"{_tokens(error_T > LIMIT)} another gradient", figure


def _tokens(bad_T: Tensor) -> str:
    """The rows in words with their verb: a range where they are one."""
    rows = bad_T.nonzero().flatten().tolist()
    if len(rows) == len(bad_T):
        return "all tokens get"
    if rows == list(range(rows[0], rows[-1] + 1)) and len(rows) > 1:
        return f"tokens {rows[0]} to {rows[-1]} get"
    return f"token {rows[0]} gets" if len(rows) == 1 else f"{len(rows)} of {len(bad_T)} tokens get"


def _tail(ident: Identification, probe: Probe, grad_TV: Tensor) -> str:
    """In words, a tail of the vocabulary that is left out of log Z or counted again; "" where the flattest row shows none.

    Where every column is counted once, the gradient next to onehot(y) and smoothing is one number times p; a miscounted
    tail has another one.
    """
    model = ident.model
    row = int((probe.p_TV.amax(-1) + (~probe.valid_T).double()).argmin())
    p_V = probe.p_TV[row]
    # Take the part of CE that is not along p off: −(1 − ε) onehot(y) − ε/V.
    flat_V = model.ce_source(probe)[row] - math.copysign(model.ce_weight(probe), model.ce_scale) * p_V
    use = ((probe.onehot_TV[row] == 0) & (p_V > 1e-9)).nonzero().flatten()
    if len(use) < 100 or any(penalty.quantity != RAW for penalty in model.penalties):
        return ""
    x = ((grad_TV[row] - flat_V) / p_V.clamp(min=1e-300))[use]
    off = (x - x.median()).abs() > (1e-6 if ident.eps < 1e-10 else 3e-4) * x.median().abs()
    first = int(off.int().argmax())
    if not bool(off[first:].all()):
        return ""
    return f"columns from {int(use[first]):,} on are miscounted in log Z, a tail of the vocabulary"
