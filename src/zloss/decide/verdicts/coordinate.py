"""The diagnosed coordinate: does a method lower the quantity it is meant to lower?

d_s = log(q_method / q_baseline) at seed s for a quantile or a mean q over validation tokens. The spread over text comes
from 1000 paired resamples of groups of blocks: method and baseline of every seed see the same resample. The effect holds
if the upper end is at most log 0.99 (at least 1 % lower), fails ("no effect") if the lower end is above it, else open.

Axes: S seeds, B blocks, G groups, R resamples, K kept tail values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zloss.decide.verdicts.groups import contiguous_groups, group_sums
from zloss.decide.verdicts.interval import LARGEST_EXPONENT, PairedInterval, paired_interval
from zloss.decide.verdicts.part import against_bound
from zloss.results.verdict import Interval, VerdictPart

EFFECT = math.log(0.99)
RESAMPLES = 1000
BEYOND = 50
"""Tokens that must lie beyond a quantile for it to be judged."""
QUANTILES = (0.999, 0.99, 0.95)
RATIO = "ratio"
"""Unit of the interval: method / baseline."""
MOST_NUMBERS = 4_000_000
"""Numbers in memory at once while resamples of a tail are read."""


@dataclass(frozen=True)
class BlockTail:
    """The largest values of one token quantity, block by block: all that lie above one threshold common to the blocks."""

    values: tuple[tuple[float, ...], ...]
    """For each block its values above the threshold, in any order."""
    tokens_B: tuple[int, ...]
    """Tokens of each block, those below the threshold included."""

    def quantile(self, level: float) -> float:
        """The smallest kept value with at most (1 − level)·N tokens above it; NaN where too few values were kept."""
        ordered = np.sort(np.concatenate([np.asarray(v, dtype=np.float64) for v in self.values] or [np.empty(0)]))[::-1]
        place = math.floor((1 - level) * sum(self.tokens_B))
        return float(ordered[place]) if place < len(ordered) else math.nan


@dataclass(frozen=True)
class BlockMean:
    """A mean over tokens, block by block."""

    means: tuple[float, ...]
    tokens_B: tuple[int, ...]


BlockValues = BlockTail | BlockMean


def judged_level(tokens: int, asked: float = QUANTILES[0]) -> float | None:
    """The highest of 99.9, 99 and 95 %, up to `asked`, with at least 50 tokens beyond it; None where even 95 % has fewer."""
    return next(
        (level for level in QUANTILES if level <= asked and (1 - level) * tokens >= BEYOND - 1e-9),
        None,
    )


def effect_interval(
    pairs_S: Sequence[tuple[BlockValues, BlockValues]], level: float | None, seed: int = 0
) -> PairedInterval | None:
    """log(q_method / q_baseline) ± h over (baseline, method) pairs; None where q is not positive or cannot be read."""
    group_B, drawn_RG = text_resamples(len(pairs_S[0][0].tokens_B), seed)
    groups = drawn_RG.shape[1]
    once_1G = np.ones((1, groups), dtype=np.int64)
    differences, resampled_SR = [], []
    for baseline, method in pairs_S:
        point, spread = (
            np.log(resampled(method, group_B, counts, level)) - np.log(resampled(baseline, group_B, counts, level))
            for counts in (once_1G, drawn_RG)
        )
        differences.append(float(point[0]))
        resampled_SR.append(spread)
    means_R = np.mean(resampled_SR, axis=0)
    means_R = means_R[np.isfinite(means_R)]
    if not all(map(math.isfinite, differences)) or len(means_R) < RESAMPLES // 2:
        return None
    return paired_interval(differences, float(np.std(means_R, ddof=1)), groups)


def text_resamples(blocks: int, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(group of every block [B], how often each resample draws each group [R, G]); the same for the same text."""
    group_B = contiguous_groups(blocks)
    groups = int(group_B.max()) + 1
    return group_B, np.random.default_rng(seed).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)


@np.errstate(divide="ignore", invalid="ignore")
def resampled(
    values: BlockValues, group_B: NDArray[np.int64], counts_RG: NDArray[np.int64], level: float | None
) -> NDArray[np.float64]:
    """The mean or quantile of every resample, [R]; `counts_RG` says how often each group was drawn."""
    tokens_B = np.asarray(values.tokens_B, dtype=np.float64)
    tokens_R = counts_RG @ group_sums(tokens_B, group_B)
    if isinstance(values, BlockMean):
        return counts_RG @ group_sums(np.asarray(values.means) * tokens_B, group_B) / tokens_R
    assert level is not None
    kept_K = np.concatenate([np.asarray(v, dtype=np.float64) for v in values.values] or [np.empty(0)])
    out_R = np.full(len(counts_RG), np.nan)
    if not len(kept_K):
        return out_R
    order = np.argsort(kept_K)[::-1]
    group_K, largest_K = np.repeat(group_B, [len(v) for v in values.values])[order], kept_K[order]
    step = max(1, MOST_NUMBERS // len(kept_K))
    for start in range(0, len(counts_RG), step):
        part = slice(start, start + step)
        above_RK = np.cumsum(counts_RG[part][:, group_K], axis=1)
        found_RK = above_RK > ((1 - level) * tokens_R[part])[:, None]
        out_R[part] = np.where(found_RK[:, -1], largest_K[found_RK.argmax(axis=1)], np.nan)
    return out_R


def judge_effect(
    name: str, pairs_S: Sequence[tuple[BlockValues, BlockValues]], asked: float = QUANTILES[0]
) -> VerdictPart:
    """Whether `name` falls by at least 1 %, from (baseline, method) of every seed; `asked` is the quantile that is meant."""
    if not pairs_S:
        return VerdictPart("open", f"{name}: the runs do not hold it block by block; run them again.")
    tokens = sum(pairs_S[0][0].tokens_B)
    tail = isinstance(pairs_S[0][0], BlockTail)
    level = judged_level(tokens, asked) if tail else None
    if tail and level is None:
        return VerdictPart(
            "open",
            f"{name}: {tokens} validation tokens leave fewer than {BEYOND} beyond the 95 % quantile; "
            "validate on more text.",
        )
    shown = _shown(name, level, asked)
    numbers = {"quantity": name, "level": level, **_unjudged(pairs_S, level, asked)}
    if level is not None and all(_is_removed(*pair, level) for pair in pairs_S):
        seeds = len(pairs_S)
        numbers |= {"ratio": 0.0, "seeds": seeds}
        if seeds < 2:
            return VerdictPart("open", f"one seed: {shown} is 0; run at least one more seed.", numbers)
        return VerdictPart("holds", f"{shown} is 0 on every seed.", numbers, Interval(0.0, 0.0, RATIO))
    interval = effect_interval(pairs_S, level)
    if interval is None:
        return VerdictPart("open", f"{shown} is zero or not finite on some seed, so no ratio exists.", numbers)
    return judge_ratio(shown, interval, numbers)


def judge_ratio(shown: str, interval: PairedInterval, numbers: Mapping[str, Any]) -> VerdictPart:
    """The part of a log ratio and its interval."""
    state = against_bound(interval.lower, interval.upper, EFFECT)
    settle = interval.seeds_to_settle(EFFECT)
    ratio = math.exp(min(interval.difference, LARGEST_EXPONENT))
    numbers = {
        **numbers,
        "ratio": ratio,
        "seeds": interval.seeds,
        "groups": interval.groups,
        "seeds_to_settle": settle,
    }
    if interval.lower is None or interval.upper is None or not math.isfinite(interval.upper):
        why = "one seed" if interval.seeds < 2 else "one group of validation text"
        more = "run at least one more seed" if interval.seeds < 2 else "validate on more text"
        return VerdictPart("open", f"{why}: {shown} × {ratio:.4g}; {more}.", numbers)
    low, high = (math.exp(min(bound, LARGEST_EXPONENT)) for bound in (interval.lower, interval.upper))
    bounds = Interval(low, high, RATIO)
    span = f"{shown} × {ratio:.4g} ({low:.4g} to {high:.4g})"
    if state == "fails":
        return VerdictPart(state, f"no effect: {span}, not at least 1 % lower.", numbers, bounds)
    if state == "holds":
        return VerdictPart(state, f"{span}.", numbers, bounds)
    can_settle = settle is not None and settle > interval.seeds
    more = f"{settle} seeds would settle it at the present spread" if can_settle else "validate on more text"
    return VerdictPart(state, f"{span}; {more}.", numbers, bounds)


def _shown(name: str, level: float | None, asked: float) -> str:
    if level is None:
        return f"mean of {name}"
    less = f" (p{100 * asked:g} has fewer than {BEYOND} tokens beyond it)" if level < asked else ""
    return f"p{100 * level:g} of {name}{less}"


def _unjudged(pairs_S: Sequence[tuple[BlockValues, BlockValues]], level: float | None, asked: float) -> dict[str, Any]:
    """The ratio at the quantile that is meant, averaged over seeds, where a lower one is judged."""
    if level is None or level == asked:
        return {}
    logs = []
    for baseline, method in pairs_S:
        assert isinstance(baseline, BlockTail)
        assert isinstance(method, BlockTail)
        before, after = baseline.quantile(asked), method.quantile(asked)
        if not (before > 0 and after > 0):
            return {}
        logs.append(math.log(after / before))
    return {"unjudged_level": asked, "unjudged_ratio": math.exp(statistics.fmean(logs))}


def _is_removed(baseline: BlockValues, method: BlockValues, level: float) -> bool:
    """Whether the quantity is 0 up to the quantile where the baseline's is not."""
    assert isinstance(baseline, BlockTail)
    assert isinstance(method, BlockTail)
    return method.quantile(level) == 0 and baseline.quantile(level) > 0
