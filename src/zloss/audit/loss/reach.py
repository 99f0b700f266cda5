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
from zloss.audit.loss.callable import BlackBox, probe_width
from zloss.audit.loss.confirm import factors
from zloss.audit.loss.decompose import decompose
from zloss.audit.loss.fit import ROUNDING
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.measured import measure
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe, Space

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

Verdict = Literal["same", "differs", "refused", "left_out"]


@dataclass(frozen=True)
class SizeTried:
    """One size and what it gave."""

    words: str
    verdict: Verdict
    sentence: str = ""
    figure: float | None = None


def try_sizes(
    box: BlackBox,
    ident: Identification,
    seed: int,
    *,
    thorough: bool,
    advance: Callable[[], None],
    again: tuple[SizeTried, ...] | None = None,
) -> tuple[SizeTried, ...]:
    """Every size within the time budget, judged against what the small probes identified.

    With `again` only those sizes on which it was found to differ, on other rows.
    """
    wrong = None if again is None else {one.words for one in again if one.verdict == "differs"}
    form = any(c.name == "form" for c in ident.selection.fit.candidates)
    if not ident.told or ident.selection.how in ("filtered", "rounded") or ident.coarse or form:
        return ()
    generator = torch.Generator().manual_seed(seed + 5)
    started, rate, out = time.perf_counter(), 0.0, []
    for space, masked in _sizes(ident, thorough):
        entries = space.tokens * space.width
        words = f"T = {space.tokens:,}, V = {space.width:,}" + (", part of the tokens ignored" if masked else "")
        if wrong is not None and words not in wrong:
            continue
        advance()
        if not thorough and time.perf_counter() - started + rate * entries > BUDGET:
            out.append(SizeTried(words, "left_out", "it would take too long; `thorough=True` tries it"))
            continue
        begun = time.perf_counter()
        out.append(_try(box, ident, space, masked, words, generator))
        # Building and judging a probe counts as well.
        rate = max(rate, (time.perf_counter() - begun) / entries) if entries > 5000 else rate
    return tuple(out)


def _sizes(ident: Identification, thorough: bool) -> Iterator[tuple[Space, bool]]:
    space = ident.space
    for tokens in TOKENS:
        yield replace(space, tokens=tokens), False
    if ident.trusted and ident.identified.ce_weights != "groups":
        # What a mask does to a denominator without a name is not known.
        masked = ident.denominators.masks_accepted and ident.denominators.named
        yield replace(space, tokens=OF if masked else COUNTED), masked
    if space.padded:
        return
    for vocab in VOCABS:
        yield replace(space, lanes=vocab, width=vocab, tokens=ROWS, avoid=space.avoid | SPECIAL), False
    if thorough:
        for tokens, vocab in BOTH:
            yield replace(space, lanes=vocab, width=vocab, tokens=tokens, avoid=space.avoid | SPECIAL), False


def _try(
    box: BlackBox, ident: Identification, space: Space, masked: bool, words: str, generator: torch.Generator
) -> SizeTried:
    draw = probes.mixed if space.tokens <= 256 else probes.many
    probe = draw(generator, **space.sizes())
    if box.linear and ident.scale_power:
        here = ident.model_at(probe_width(space.tokens, space.width))
        ident = replace(ident, model=here, scale_power=0.0)
    # Every class is a target once where the rows suffice.
    if space.tokens >= 2 * space.lanes:
        classes = probes.allowed(torch.arange(space.tokens) % space.lanes, space.lanes, space.avoid)
        target = torch.where(torch.arange(space.tokens) % 2 == 1, classes, probe.target_T)
        probe = Probe(probe.name, replace(probe.reference, target_T=target), probe.saturated_T)
    keep = torch.ones(space.tokens, dtype=torch.bool)
    if masked:
        keep[torch.randperm(space.tokens, generator=generator)[COUNTED:]] = False
        probe = probe.masked(keep)
    try:
        outcome = box(probe.logits_TV, probe.target_T, dtype=ident.dtype)
    except LossCallError as error:
        return SizeTried(words, "refused", str(error))
    if not outcome.finite:
        return SizeTried(words, "differs", "loss or gradient is not finite")
    if not ident.trusted or ident.identified.extra.keys() & {"shift_coef", "beta"}:
        return _directions(ident, probe, outcome.grad_TV, keep, words)
    return _judge(ident, probe, outcome.grad_TV, keep, words)


def _directions(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor, words: str) -> SizeTried:
    """Where token weights or gains make prediction impossible: every row must still be made of p, onehot(y) and 1/V."""
    rows = decompose(measure([(probe, grad_TV)], ident.eps, ident.model.warp))
    bad = keep & rows.solved_T & ~rows.inside_T
    silent = keep & (grad_TV.norm(dim=-1) == 0)
    if bool(silent.any()) and ident.identified.ce_weights == "uniform":
        return SizeTried(words, "differs", f"{_tokens(silent)} {_verb(silent)} no gradient")
    if not bool(bad.any()):
        return SizeTried(words, "same")
    return SizeTried(
        words, "differs", f"{_tokens(bad)} {_verb(bad)} a gradient that is not made of p, onehot(y) and 1/V"
    )


def _judge(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor, words: str) -> SizeTried:
    r = probe.reference
    ce_TV, z_TV = ident.model.ce_source(r), ident.model.z_source(r)
    error_T = _errors(ident, probe, grad_TV - ce_TV - z_TV, ce_TV, z_TV)[keep]
    worst = float(error_T.max())
    if r.lanes > ident.space.lanes and ident.model.warp.identity and (where := _tail(ident, probe, grad_TV, keep)):
        return SizeTried(words, "differs", where, worst)
    changed = "" if worst <= LIMIT else _common_factors(ident, probe, grad_TV, ce_TV, z_TV, keep)
    if changed is not None:
        changed = changed or _miscounted(ident, probe, grad_TV)
        return SizeTried(words, "differs" if changed else "same", changed, worst if changed or worst <= LIMIT else None)
    weights = _token_weights(ident, probe, grad_TV, ce_TV, z_TV, keep)
    if weights is not None:
        return SizeTried(words, "differs" if weights else "same", weights, worst if weights else None)
    bad = torch.zeros_like(keep)
    bad[keep] = error_T > LIMIT
    return SizeTried(words, "differs", f"{_tokens(bad)} {_verb(bad)} another gradient", worst)


def _miscounted(ident: Identification, probe: Probe, grad_TV: Tensor) -> str:
    """In words, a count that is off by more than rounding of the gradient; "" where both denominators are exact."""
    named = {"CE": ident.identified.ce_denominator, "Z": ident.identified.z_denominator}
    if len(probe.target_T) < 256 or not ident.model.warp.identity:
        return ""
    slack = max(COUNT_LIMIT, 1e3 * ident.eps) + 2 * (ident.identified.uncertainty.coef_relative or 0.0)
    found = []
    for (part, name), factor in zip(named.items(), factors(ident, probe, grad_TV), strict=True):
        if name in COUNTS and slack < abs(factor - 1) < LIMIT:
            count = ident.model.count(name, probe.reference)
            found.append(f"{count:,.0f} tokens are counted as {count / factor:,.1f} in the denominator of {part}")
    return "; ".join(found)


COUNTS = ("valid", "all", "mean", "valid+1", "all+1", "valid-1")


def _errors(ident: Identification, probe: Probe, left_TV: Tensor, ce_TV: Tensor, z_TV: Tensor) -> Tensor:
    """Per token ‖left‖ beyond rounding over ‖Z source‖: that of an uncertain token is flat and small beside others."""
    wanted_T = (ce_TV + z_TV).norm(dim=-1)
    # A softmax of V classes sums V rounded terms.
    spread = max(1.0, math.sqrt(probe.reference.lanes / 96))
    # Confident rows are free of rounding at a small vocabulary only; a warp is known no better than it was searched.
    unit = ident.eps if ident.model.warp.identity else max(ident.eps, 1e-7)
    noise_T = 1.0 + probe.reference.max_T.abs()
    rounding_T = ROUNDING * unit * noise_T * spread * wanted_T.clamp(min=_ce_weight(ident, probe))
    beyond_T = (left_TV.norm(dim=-1) - rounding_T).clamp(min=0)
    scale_T = (z_TV if ident.identified.has_z else ce_TV).norm(dim=-1)
    middle = float(scale_T.median())
    # Where log Z happens to lie at c the Z source vanishes, and any error would be large beside it.
    error_T: Tensor = beyond_T / scale_T.clamp(min=max(1e-2 * middle, 1e-300))
    return error_T


def _common_factors(
    ident: Identification, probe: Probe, grad_TV: Tensor, ce_TV: Tensor, z_TV: Tensor, keep: Tensor
) -> str | None:
    """In words, what one factor on CE, one on Z and another c explain; "" where that is known already, None if nothing."""
    columns, named = [ce_TV], ident.identified
    if ident.model.penalties:
        columns.append(z_TV)
        lead = ident.model.penalties[0].candidate
        if not lead.fixed:
            unit = ident.model.warp.transport(probe.reference, lead.shape(ident.model.warp.reference(probe.reference)))
            columns.append(-unit * probe.reference.valid_T.unsqueeze(-1))
    weight = (1 / probe.noise_T).unsqueeze(-1)[keep]
    stacked = torch.stack([(c[keep] * weight).flatten() for c in columns], dim=-1)
    scale = stacked.norm(dim=0).clamp(min=1e-300)
    x = torch.linalg.lstsq(stacked / scale, (grad_TV[keep] * weight).flatten().unsqueeze(-1)).solution.flatten() / scale
    left = grad_TV - sum((v * c for v, c in zip(x.tolist(), columns, strict=True)), torch.zeros_like(grad_TV))
    if float(_errors(ident, probe, left, ce_TV, z_TV)[keep].max()) > LIMIT:
        return None
    ce = float(x[0])
    z = float(x[1]) if len(columns) > 1 else 1.0
    parts = []
    if abs(ce - 1) > LIMIT and named.ce_denominator != "other":
        parts.append(f"the weight on CE is {ce:.4g} times what it is on small batches")
    if len(columns) > 1 and abs(z - 1) > LIMIT and named.z_denominator != "other":
        parts.append(f"λ is {z:.4g} times what it is on small batches and a small vocabulary")
    if len(columns) > 2 and abs(z) > 0 and named.target_rule in ("log_v", "constant"):
        amplitude = 2 * ident.model.penalties[0].coef * z
        count = ident.model.count(ident.model.z_denominator or "sum", probe.reference)
        moved = float(x[2]) * count / amplitude if amplitude else 0.0
        if abs(moved) > 1e-2:
            parts.append(f"c is {moved:+.4g} away from what small sizes show")
    return "; ".join(parts)


def _token_weights(
    ident: Identification, probe: Probe, grad_TV: Tensor, ce_TV: Tensor, z_TV: Tensor, keep: Tensor
) -> str | None:
    """ "" where each row is whole with a positive weight of its own (means of groups); words where some have none."""
    wanted = ce_TV + z_TV
    w = ((grad_TV * wanted).sum(-1) / (wanted * wanted).sum(-1).clamp(min=1e-300)).unsqueeze(-1)
    if float(_errors(ident, probe, grad_TV - w * wanted, ce_TV, z_TV)[keep].max()) > LIMIT:
        return None
    silent = keep & (w.squeeze(-1).abs() < 1e-6) & (wanted.norm(dim=-1) > 1e-6 * float(wanted.norm()))
    if bool(silent.any()):
        return f"{_tokens(silent)} {_verb(silent)} no gradient"
    return "" if bool((w[keep] >= 0).all()) else "the gradient of some tokens changes its sign"


def _verb(bad_T: Tensor) -> str:
    return "gets" if int(bad_T.sum()) == 1 else "get"


def _tokens(bad_T: Tensor) -> str:
    """The rows in words: a range where they are one."""
    rows = bad_T.nonzero().flatten().tolist()
    if len(rows) == len(bad_T):
        return "all tokens"
    if rows == list(range(rows[0], rows[-1] + 1)) and len(rows) > 1:
        return f"tokens {rows[0]} to {rows[-1]}"
    return f"token {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {len(bad_T)} tokens"


def _ce_weight(ident: Identification, probe: Probe) -> float:
    """The weight on the CE of one token."""
    return abs(ident.model.ce_scale) / ident.model.count(ident.model.ce_denominator, probe.reference)


def _tail(ident: Identification, probe: Probe, grad_TV: Tensor, keep: Tensor) -> str:
    """In words, a tail of the vocabulary that is left out of log Z or counted again; "" where the flattest row shows none.

    Where every column is counted once, the gradient beside onehot(y) and smoothing is one number times p; a miscounted
    tail is a step in their ratio.
    """
    r = probe.reference
    row = int((r.p_TV.amax(-1) + (~keep).double()).argmin())
    p_V, onehot_V = r.p_TV[row], r.onehot_TV[row]
    # Take the part of CE that is not along p off: −(1 − ε) onehot(y) − ε/V.
    flat_V = ident.model.ce_source(r)[row] - _ce_weight(ident, probe) * math.copysign(1, ident.model.ce_scale) * p_V
    use = ((onehot_V == 0) & (p_V > 1e-9)).nonzero().flatten()
    if len(use) < 100 or any(penalty.candidate.name != "raw" for penalty in ident.model.penalties):
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
