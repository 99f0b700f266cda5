"""Quality: is the validation cross-entropy of a method within a tolerance of its baseline's?

d_s = mean over validation tokens of CE(method) − CE(baseline) at seed s, on the same blocks; Δ = mean of d_s.
The spread over text is that of G contiguous groups of blocks of the seed-averaged difference.

Axes: S seeds, B validation blocks, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zloss.decide.verdicts.groups import LEAST_GROUPS, contiguous_groups, group_sums
from zloss.decide.verdicts.interval import PairedInterval, paired_interval
from zloss.decide.verdicts.part import VerdictPart, against_bound


@dataclass(frozen=True)
class BlockCrossEntropies:
    """Mean cross-entropy of every validation block, [S, B], of a method and of its baseline at the same seeds."""

    baseline_SB: NDArray[np.float64]
    method_SB: NDArray[np.float64]
    tokens_B: NDArray[np.float64]
    documents_B: Sequence[int] | None = None


def quality_interval(ce: BlockCrossEntropies) -> PairedInterval:
    """Δ ± h in nats."""
    gap_SB = ce.method_SB - ce.baseline_SB
    differences_S = gap_SB @ ce.tokens_B / ce.tokens_B.sum()
    group_B = contiguous_groups(len(ce.tokens_B), ce.documents_B)
    tokens_G = group_sums(ce.tokens_B, group_B)
    means_G = group_sums(gap_SB.mean(axis=0) * ce.tokens_B, group_B) / tokens_G
    groups = len(tokens_G)
    error = float(np.std(means_G, ddof=1)) / math.sqrt(groups) if groups > 1 else math.inf
    return paired_interval([float(value) for value in differences_S], error, groups)


def judge_quality(ce: BlockCrossEntropies, *, baseline_ppl: float, tolerance_ppl: float) -> VerdictPart:
    """Holds if Δ + h ≤ tolerance, fails if Δ − h > tolerance, else open; open with one seed, never holds below 8 groups."""
    interval = quality_interval(ce)
    tolerance = math.log1p(tolerance_ppl / baseline_ppl)

    def ppl(nats: float | None) -> float | None:
        return None if nats is None or not math.isfinite(nats) else baseline_ppl * math.expm1(nats)

    state = against_bound(interval.lower, interval.upper, tolerance)
    settle = interval.seeds_to_settle(tolerance)
    enough = interval.groups >= LEAST_GROUPS
    if state == "holds" and not enough:
        state = "open"
    reason = _reason(interval, state, tolerance_ppl, ppl, settle, enough=enough)
    return VerdictPart(
        state,
        reason,
        {
            "delta_ce": interval.difference,
            "half_width": _finite(interval.half_width),
            "lower_ppl": ppl(interval.lower),
            "upper_ppl": ppl(interval.upper),
            "delta_ppl": ppl(interval.difference),
            "tolerance_ce": tolerance,
            "tolerance_ppl": tolerance_ppl,
            "smallest_tolerance_ppl": ppl(interval.upper),
            "seeds": interval.seeds,
            "groups": interval.groups,
            "seeds_to_settle": settle,
            "seed_half_width": _finite(interval.seed_part),
            "text_half_width": _finite(interval.group_part),
        },
    )


def _reason(
    interval: PairedInterval, state: str, tolerance_ppl: float, ppl: object, settle: int | None, *, enough: bool
) -> str:
    assert callable(ppl)
    if interval.half_width is None:
        return (
            f"one seed: ΔCE = {interval.difference:+.4g} nat ({ppl(interval.difference):+.3g} PPL) without an interval; "
            "run at least one more seed."
        )
    span = (
        f"ΔCE = {interval.difference:+.4g} ± {interval.half_width:.2g} nat "
        f"({ppl(interval.lower):+.3g} … {ppl(interval.upper):+.3g} PPL; tolerance {tolerance_ppl:.3g} PPL)"
        if math.isfinite(interval.half_width)
        else f"ΔCE = {interval.difference:+.4g} nat without an interval"
    )
    if state == "open":
        if not enough:
            return f"{span}: {interval.groups} groups of validation text, at least {LEAST_GROUPS} are needed."
        if settle is not None and settle > interval.seeds:
            return f"{span}: {settle} seeds would settle it at the present spread."
        return f"{span}: more seeds alone cannot settle it; validate on more text."
    return f"{span}."


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
