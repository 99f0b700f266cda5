"""The same loss at other sizes: many tokens, many counted tokens, large vocabularies. Bugs in tails of blocks live there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.calls import BlackBox, LossCallError, probe_width
from zloss.audit.loss.identify import Identification, factors
from zloss.audit.loss.probes import Probe, Space, draw, seeded
from zloss.audit.loss.source import NAMED, ROUNDING, decompose

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
"""Seconds for all sizes; what a slow loss leaves is named as not tried."""
BOTH = ((1000, 33000), (300, 131071))
"""Tokens and vocabulary at once, with `thorough`."""
SPECIAL = frozenset({0, 1, 2, 3, 50256, 50257})
"""Ids of special tokens that a loss may ignore; no targets at a large vocabulary."""


@dataclass(frozen=True)
class SizeTried:
    """One size and what it gave."""

    shape: tuple[int, int]
    masked: bool
    verdict: Literal["same", "differs", "refused", "left_out"]
    sentence: str = ""
    figure: float | None = None

    @property
    def words(self) -> str:
        tokens, vocab = self.shape
        return f"T = {tokens:,}, V = {vocab:,}" + (", part of the tokens ignored" if self.masked else "")


def try_sizes(
    box: BlackBox,
    ident: Identification,
    seed: int,
    *,
    thorough: bool,
    advance: Callable[[], None] = lambda: None,
    again: tuple[SizeTried, ...] | None = None,
) -> tuple[SizeTried, ...]:
    """Every size within the time budget, compared with what the small probes identified.

    With `again` only those sizes on which it was found to differ, on other rows.
    """
    if not ident.known or ident.how not in ("none", "explained") or ident.coarse:
        return ()
    wrong = None if again is None else {one.words for one in again if one.verdict == "differs"}
    started, rate, out = time.perf_counter(), 0.0, []
    for space, masked in _sizes(ident, thorough):
        shape, entries = (space.tokens, space.width), space.tokens * space.width
        left_out = SizeTried(shape, masked, "left_out", "it would take too long; `thorough=True` tries it")
        if wrong is not None and left_out.words not in wrong:
            continue
        advance()
        if not thorough and time.perf_counter() - started + rate * entries > BUDGET:
            out.append(left_out)
            continue
        begun = time.perf_counter()
        verdict, sentence, figure = _try(box, ident, space, masked, seed)
        out.append(SizeTried(shape, masked, verdict, sentence, figure))
        # Building and comparing a probe counts as well.
        rate = max(rate, (time.perf_counter() - begun) / entries) if entries > 5000 else rate
    return tuple(out)


def _sizes(ident: Identification, thorough: bool) -> Iterator[tuple[Space, bool]]:
    space = ident.space
    for tokens in TOKENS:
        yield replace(space, tokens=tokens), False
    if ident.trusted and ident.identified.ce_weights != "groups":
        # What a mask does to a denominator without a name is not known.
        masked = ident.masks_accepted and {ident.model.ce_denominator, ident.model.z_denominator or "none"} <= NAMED
        yield replace(space, tokens=OF if masked else COUNTED), masked
    if space.padded:
        return
    large = [(ROWS, vocab) for vocab in VOCABS] + (list(BOTH) if thorough else [])
    for tokens, vocab in large:
        yield replace(space.with_vocab(vocab), tokens=tokens, avoid=space.avoid | SPECIAL), False


Answer = tuple[Literal["same", "differs", "refused"], str, float | None]


def _try(box: BlackBox, ident: Identification, space: Space, masked: bool, seed: int) -> Answer:
    generator, probe = seeded(seed + 5), draw("mixed", space, seed + 5)
    if box.linear and ident.scale_power:
        here = ident.model_at(probe_width(space.tokens, space.width))
        ident = replace(ident, model=here, scale_power=0.0)
    # Every class is a target once where the rows suffice.
    if space.tokens >= 2 * space.lanes:
        classes = probes.allowed(torch.arange(space.tokens) % space.lanes, space.lanes, space.avoid)
        probe = probe.with_targets(torch.where(torch.arange(space.tokens) % 2 == 1, classes, probe.target_T))
    keep = torch.ones(space.tokens, dtype=torch.bool)
    if masked:
        keep[torch.randperm(space.tokens, generator=generator)[COUNTED:]] = False
        probe = probe.masked(keep)
    try:
        outcome = box(probe, ident.dtype)
    except LossCallError as error:
        return "refused", str(error), None
    if not outcome.finite:
        return "differs", "loss or gradient is not finite", None
    if not ident.trusted or ident.identified.extra.keys() & {"shift_coef", "beta"}:
        return _inside_shapes(ident, probe, outcome.grad_TV, keep)
    return _compare(ident, probe, outcome.grad_TV, keep)


def _inside_shapes(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor) -> Answer:
    """Where token weights or gains make prediction impossible: every row must still be made of the known shapes."""
    rows = decompose([(probe, grad_TV)], ident.eps, warp=ident.model.warp, fourth=ident.rows.fourth)
    bad, silent = keep & rows.solved_T & ~rows.inside_T, keep & (grad_TV.norm(dim=-1) == 0)
    if bool(silent.any()) and ident.identified.ce_weights == "uniform":
        return "differs", f"{_tokens(silent)} no gradient", None
    if not bool(bad.any()):
        return "same", "", None
    return "differs", f"{_tokens(bad)} a gradient that is not made of p, onehot(y) and 1/V", None


def _compare(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor) -> Answer:
    """The gradient against the model: equal, equal up to factors that are known to vary, or different in words."""
    r = probe.reference
    ce_TV, z_TV = ident.model.ce_source(r), ident.model.z_source(r)

    def worst(left_TV: Tensor) -> Tensor:
        return _errors(ident, probe, left_TV, ce_TV, z_TV)[keep]

    error_T = worst(grad_TV - ce_TV - z_TV)
    figure = float(error_T.max())
    if r.lanes > ident.space.lanes and ident.model.warp.identity and (where := _tail(ident, probe, grad_TV, keep)):
        return "differs", where, figure
    changed = "" if figure <= LIMIT else _common_factors(ident, probe, grad_TV, ce_TV, z_TV, keep, worst)
    if changed is not None:
        changed = changed or _miscounted(ident, probe, grad_TV)
        return ("differs" if changed else "same"), changed, figure if changed or figure <= LIMIT else None
    # Each row whole, with a positive weight of its own: means of groups.
    wanted = ce_TV + z_TV
    w = ((grad_TV * wanted).sum(-1) / (wanted * wanted).sum(-1).clamp(min=1e-300)).unsqueeze(-1)
    if float(worst(grad_TV - w * wanted).max()) <= LIMIT:
        silent = keep & (w.squeeze(-1).abs() < 1e-6) & (wanted.norm(dim=-1) > 1e-6 * float(wanted.norm()))
        if bool(silent.any()):
            return "differs", f"{_tokens(silent)} no gradient", figure
        if bool((w[keep] >= 0).all()):
            return "same", "", None
        return "differs", "the gradient of some tokens changes its sign", figure
    bad = torch.zeros_like(keep)
    bad[keep] = error_T > LIMIT
    return "differs", f"{_tokens(bad)} another gradient", figure


def _miscounted(ident: Identification, probe: Probe, grad_TV: Tensor) -> str:
    """In words, a count that is off by more than rounding of the gradient; "" where both denominators are exact."""
    named = {"CE": ident.identified.ce_denominator, "Z": ident.identified.z_denominator}
    if len(probe.target_T) < 256 or not ident.model.warp.identity:
        return ""
    slack = max(COUNT_LIMIT, 1e3 * ident.eps) + 2 * (ident.identified.uncertainty.coef_relative or 0.0)
    found = []
    for (part, name), factor in zip(named.items(), factors(ident, probe, grad_TV), strict=True):
        if name in ("valid", "all", "mean", "valid+1", "all+1", "valid-1") and slack < abs(factor - 1) < LIMIT:
            count = ident.model.count(name, probe.reference)
            found.append(f"{count:,.0f} tokens are counted as {count / factor:,.1f} in the denominator of {part}")
    return "; ".join(found)


def _errors(ident: Identification, probe: Probe, left_TV: Tensor, ce_TV: Tensor, z_TV: Tensor) -> Tensor:
    """Per token ‖left‖ beyond rounding over ‖Z source‖: that of an uncertain token is flat and small next to others."""
    # A softmax of V classes sums V rounded terms; a warp is known no better than it was searched.
    spread = max(1.0, math.sqrt(probe.reference.lanes / 96))
    unit = ident.eps if ident.model.warp.identity else max(ident.eps, 1e-7)
    noise_T = 1.0 + probe.reference.max_T.abs()
    rounding_T = ROUNDING * unit * noise_T * spread * (ce_TV + z_TV).norm(dim=-1).clamp(min=_ce_weight(ident, probe))
    beyond_T = (left_TV.norm(dim=-1) - rounding_T).clamp(min=0)
    scale_T = (z_TV if ident.identified.has_z else ce_TV).norm(dim=-1)
    # Where log Z happens to lie at c the Z source vanishes, and any error would be large next to it.
    error_T: Tensor = beyond_T / scale_T.clamp(min=max(1e-2 * float(scale_T.median()), 1e-300))
    return error_T


def _common_factors(
    ident: Identification,
    probe: Probe,
    grad_TV: Tensor,
    ce_TV: Tensor,
    z_TV: Tensor,
    keep: Tensor,
    worst: Callable[[Tensor], Tensor],
) -> str | None:
    """In words, what one factor on CE, one on Z and another c explain; "" where that is known already, None if nothing."""
    columns, named = [ce_TV], ident.identified
    if ident.model.penalties:
        columns.append(z_TV)
        lead = ident.model.penalties[0].quantity
        if not lead.fixed:
            unit = ident.model.warp.transport(probe.reference, lead.shape(ident.model.warp.reference(probe.reference)))
            columns.append(-unit * probe.reference.valid_T.unsqueeze(-1))
    weight = (1 / probe.noise_T).unsqueeze(-1)[keep]
    stacked = torch.stack([(c[keep] * weight).flatten() for c in columns], dim=-1)
    scale = stacked.norm(dim=0).clamp(min=1e-300)
    x = torch.linalg.lstsq(stacked / scale, (grad_TV[keep] * weight).flatten().unsqueeze(-1)).solution.flatten() / scale
    left = grad_TV - sum((v * c for v, c in zip(x.tolist(), columns, strict=True)), torch.zeros_like(grad_TV))
    if float(worst(left).max()) > LIMIT:
        return None
    ce, z = float(x[0]), float(x[1]) if len(columns) > 1 else 1.0
    parts = []
    if abs(ce - 1) > LIMIT and named.ce_denominator != "other":
        parts.append(f"the weight on CE is {ce:.4g} times what it is on small batches")
    if len(columns) > 1 and abs(z - 1) > LIMIT and named.z_denominator != "other":
        parts.append(f"λ is {z:.4g} times what it is on small batches and a small vocabulary")
    if len(columns) > 2 and abs(z) > 0 and named.target_rule in ("log_v", "constant"):
        slope = 2 * ident.model.penalties[0].coef * z
        moved = float(x[2]) * ident.model.count(ident.model.z_denominator or "sum", probe.reference) / slope
        if abs(moved) > 1e-2:
            parts.append(f"c is {moved:+.4g} away from what small sizes show")
    return "; ".join(parts)


def _tokens(bad_T: Tensor) -> str:
    """The rows in words with their verb: a range where they are one."""
    rows = bad_T.nonzero().flatten().tolist()
    if len(rows) == len(bad_T):
        return "all tokens get"
    if rows == list(range(rows[0], rows[-1] + 1)) and len(rows) > 1:
        return f"tokens {rows[0]} to {rows[-1]} get"
    return f"token {rows[0]} gets" if len(rows) == 1 else f"{len(rows)} of {len(bad_T)} tokens get"


def _ce_weight(ident: Identification, probe: Probe) -> float:
    """The weight on the CE of one token."""
    return abs(ident.model.ce_scale) / ident.model.count(ident.model.ce_denominator, probe.reference)


def _tail(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor) -> str:
    """In words, a tail of the vocabulary that is left out of log Z or counted again; "" where the flattest row shows none.

    Where every column is counted once, the gradient next to onehot(y) and smoothing is one number times p; a miscounted
    tail is a step in their ratio.
    """
    r = probe.reference
    row = int((r.p_TV.amax(-1) + (~keep).double()).argmin())
    p_V, onehot_V = r.p_TV[row], r.onehot_TV[row]
    # Take the part of CE that is not along p off: −(1 − ε) onehot(y) − ε/V.
    flat_V = ident.model.ce_source(r)[row] - _ce_weight(ident, probe) * math.copysign(1, ident.model.ce_scale) * p_V
    use = ((onehot_V == 0) & (p_V > 1e-9)).nonzero().flatten()
    if len(use) < 100 or any(penalty.quantity.name != "raw" for penalty in ident.model.penalties):
        return ""
    x = ((grad_TV[row] - flat_V) / p_V.clamp(min=1e-300))[use]
    n = torch.arange(1, len(x), dtype=x.dtype)
    left, total = x.cumsum(0)[:-1], x.sum()
    squares_left, squares = (x * x).cumsum(0)[:-1], (x * x).sum()
    # The step that leaves the least variance on both sides.
    within = squares_left - left**2 / n + (squares - squares_left) - (total - left) ** 2 / (len(x) - n)
    at = int(within.argmin()) + 1
    before, after = float(x[:at].mean()), float(x[at:].mean())
    noise = max(float(within.min()) / len(x), 0.0) ** 0.5
    least = 1e-6 if ident.eps < 1e-10 else 3e-4
    if abs(after - before) < max(20 * noise, least * abs(before)):
        return ""
    return f"columns from {int(use[at]):,} on are miscounted in log Z, a tail of the vocabulary"
