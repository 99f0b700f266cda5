"""Quality: is the validation cross-entropy of a method within a tolerance of its baseline's?

d_s = mean over validation tokens of CE(method) − CE(baseline) at seed s, on the same blocks; Δ = mean of d_s.
The spread over text is that of G contiguous groups of blocks of the seed-averaged difference.

Axes: S seeds, B validation blocks, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zloss.decide.verdicts.groups import LEAST_GROUPS, contiguous_groups, group_sums
from zloss.decide.verdicts.interval import LARGEST_EXPONENT, PairedInterval, paired_interval
from zloss.decide.verdicts.part import against_bound
from zloss.errors import InputError
from zloss.results.verdict import Interval, VerdictPart

NATS = "nats per token"
RUN_AGAIN = "the runs hold no per-block validation: run them again"


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
    return _judge(quality_interval(ce), baseline_ppl, tolerance_ppl)


def judge_quality_by_seed(differences_S: Sequence[float], *, baseline_ppl: float, tolerance_ppl: float) -> VerdictPart:
    """The same without per-block validation: the spread over text is unknown, so quality fails or stays open."""
    return _judge(paired_interval(differences_S, 0.0, 0), baseline_ppl, tolerance_ppl)


def _judge(interval: PairedInterval, baseline_ppl: float, tolerance_ppl: float) -> VerdictPart:
    if not baseline_ppl > 0:
        raise InputError(
            f"the PPL of the baseline is expected to be above 0, but is {baseline_ppl:g}: its run is damaged."
        )
    # A tolerance of −100 % of the PPL and less asks for a CE of −∞, which no method reaches.
    share = tolerance_ppl / baseline_ppl
    tolerance = math.log1p(share) if share > -1 else -math.inf

    def ppl(nats: float | None) -> float | None:
        return (
            None
            if nats is None or not math.isfinite(nats) or nats > LARGEST_EXPONENT
            else baseline_ppl * math.expm1(nats)
        )

    state = against_bound(interval.lower, interval.upper, tolerance)
    settle = interval.seeds_to_settle(tolerance)
    if state == "holds" and interval.groups < LEAST_GROUPS:
        state = "open"
    bounds = None
    if interval.lower is not None and interval.upper is not None and math.isfinite(interval.upper):
        bounds = Interval(interval.lower, interval.upper, NATS)
    return VerdictPart(
        state,
        _reason(interval, state, tolerance_ppl, ppl, settle),
        {
            "delta_ce": interval.difference,
            "half_width": _finite(interval.half_width),
            "delta_ppl": ppl(interval.difference),
            "lower_ppl": ppl(interval.lower),
            "upper_ppl": ppl(interval.upper),
            "tolerance_ce": _finite(tolerance),
            "tolerance_ppl": tolerance_ppl,
            "smallest_tolerance_ppl": ppl(interval.upper) if interval.groups >= LEAST_GROUPS else None,
            "seeds": interval.seeds,
            "groups": interval.groups,
            "seeds_to_settle": settle,
            "seed_half_width": _finite(interval.seed_part),
            "text_half_width": _finite(interval.group_part) if interval.groups else None,
        },
        bounds,
    )


def _reason(
    interval: PairedInterval,
    state: str,
    tolerance_ppl: float,
    ppl: Callable[[float | None], float | None],
    settle: int | None,
) -> str:
    if interval.half_width is None:
        return (
            f"one seed: ΔCE = {interval.difference:+.4g} nat ({_signed(ppl(interval.difference))} PPL) without an "
            "interval; run at least one more seed."
        )
    if math.isfinite(interval.half_width):
        span = (
            f"ΔCE = {interval.difference:+.4g} ± {interval.half_width:.2g} nat ({_signed(ppl(interval.lower))} to "
            f"{_signed(ppl(interval.upper))} PPL; tolerance {tolerance_ppl:.3g} PPL)"
        )
    else:
        span = f"ΔCE = {interval.difference:+.4g} nat without an interval"
    if state == "fails":
        return f"{span}."
    if state == "holds":
        return f"{span}; the smallest tolerance that still holds is {_signed(ppl(interval.upper))} PPL."
    if not interval.groups:
        return f"{span}; {RUN_AGAIN}."
    if interval.groups < LEAST_GROUPS:
        return f"{span}; the validation text gives {interval.groups} groups, at least {LEAST_GROUPS} are needed."
    least = f"a tolerance of {_signed(ppl(interval.upper))} PPL would hold"
    if settle is not None and settle > interval.seeds:
        return f"{span}; {least}, or {settle} seeds would settle it at the present spread."
    return f"{span}; {least}; more seeds alone cannot settle it, validate on more text."


def _signed(value: float | None) -> str:
    return "∞" if value is None else f"{value:+.3g}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
