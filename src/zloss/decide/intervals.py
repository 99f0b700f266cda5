"""Intervals of paired differences between runs: over seeds, and over groups of validation blocks within each seed.

    h² = (t·sd(d_s)/√S)² + (t′·e)²

d_s is the difference at seed s (S of them), t and t′ are the one-sided 95 % quantiles of Student's t with S − 1 and
G − 1 degrees of freedom, and e is the standard error of the seed-averaged difference over G groups of validation blocks.
Two one-sided tests at 5 % then read: an upper bound holds if Δ + h is below it, and fails if Δ − h is above it.

A log ratio of quantiles or means takes e from 1000 paired resamples of groups of blocks: method and baseline of every
seed see the same resample.

Axes: S seeds, B blocks, G groups, R resamples, K kept tail values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from zloss.errors import MissingDependencyError
from zloss.results.comparison import State
from zloss.results.run_metrics import LOG_Z, MINUS_LOG_Z, ValidationBlocks

LEVEL = 0.95
MOST_GROUPS = 32
LEAST_GROUPS = 8
"""With fewer groups than this, quality never holds."""
LARGEST_EXPONENT = 700.0
"""Beyond it exp is infinite in fp64."""
MOST_SEEDS = 200
"""More seeds than this are not proposed."""
RESAMPLES = 1000
BEYOND = 50
"""Tokens that must lie beyond a quantile for it to be tested."""
QUANTILES = (0.999, 0.99, 0.95)
MOST_NUMBERS = 4_000_000
"""Numbers in memory at once while resamples of a tail are read."""


@dataclass(frozen=True)
class PairedInterval:
    """Δ ± h of a paired difference; h is infinite with one seed, whose spread is unknown."""

    difference: float
    seeds: int
    groups: int
    seed_spread: float
    """sd(d_s)."""
    seed_part: float
    """t·sd(d_s)/√S."""
    group_part: float
    """t′·e."""

    @property
    def half_width(self) -> float:
        return math.hypot(self.seed_part, self.group_part)

    @property
    def lower(self) -> float:
        return self.difference - self.half_width

    @property
    def upper(self) -> float:
        return self.difference + self.half_width

    def against(self, bound: float) -> State:
        """Two one-sided tests: below the bound holds, above it fails, across it is open."""
        return "holds" if self.upper <= bound else "fails" if self.lower > bound else "open"

    def seeds_to_settle(self, bound: float) -> int | None:
        """How many seeds would put Δ on one side of `bound` at the current spread.

        None with one seed, and where more seeds cannot help because the groups alone are as wide as the gap.
        """
        gap = abs(bound - self.difference)
        if self.seeds < 2 or self.group_part >= gap:
            return None
        for seeds in range(2, MOST_SEEDS + 1):
            part = student_quantile(seeds - 1) * self.seed_spread / math.sqrt(seeds)
            if math.hypot(part, self.group_part) <= gap:
                return seeds
        return None

    def needed(self, bound: float) -> str:
        """What would settle an open question, in a phrase."""
        seeds = self.seeds_to_settle(bound)
        if self.seeds < 2:
            return "run at least one more seed"
        if seeds is not None and seeds > self.seeds:
            return f"{seeds} seeds in total would settle it at the current spread"
        return "validate on more text"


def paired_interval(differences_S: Sequence[float], group_error: float, groups: int) -> PairedInterval:
    """The interval of the mean of `differences_S`; `group_error` is e, from `groups` groups of validation blocks.

    `groups` = 0 means that the spread over text is unknown or does not exist: e is then left out.
    """
    seeds = len(differences_S)
    group_part = 0.0 if not groups else student_quantile(groups - 1) * group_error if groups > 1 else math.inf
    spread = statistics.stdev(differences_S) if seeds > 1 else math.inf
    seed_part = student_quantile(seeds - 1) * spread / math.sqrt(seeds) if seeds > 1 else math.inf
    return PairedInterval(statistics.fmean(differences_S), seeds, groups, spread, seed_part, group_part)


@cache
def student_quantile(degrees: int) -> float:
    """The one-sided 95 % quantile of Student's t."""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise MissingDependencyError("scipy", "Evaluating a comparison", "audit") from error
    return float(t.ppf(LEVEL, degrees))


def contiguous_groups(blocks: int) -> NDArray[np.int64]:
    """The group of every block [B]: at most 32 contiguous groups of equal length."""
    return np.arange(blocks, dtype=np.int64) * min(MOST_GROUPS, blocks) // max(blocks, 1)


def group_sums(values_B: NDArray[np.float64], group_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ of a per-block quantity over each group, [G]."""
    return np.bincount(group_B, weights=values_B, minlength=int(group_B.max()) + 1).astype(np.float64)


def quality_interval(pairs_S: Sequence[tuple[ValidationBlocks, ValidationBlocks]]) -> PairedInterval:
    """Δ ± h in nats: d_s is the mean over tokens of CE(method) − CE(baseline) on the same blocks, every block finite.

    The spread over text is that of contiguous groups of blocks of the seed-averaged difference.
    """
    tokens_B = np.array(pairs_S[0][0].tokens, dtype=np.float64)
    baseline_SB, method_SB = (np.array([pair[side].ce for pair in pairs_S], dtype=np.float64) for side in (0, 1))
    gap_SB = method_SB - baseline_SB
    differences_S = gap_SB @ tokens_B / tokens_B.sum()
    group_B = contiguous_groups(len(tokens_B))
    tokens_G = group_sums(tokens_B, group_B)
    means_G = group_sums(gap_SB.mean(axis=0) * tokens_B, group_B) / tokens_G
    groups = len(tokens_G)
    error = float(np.std(means_G, ddof=1)) / math.sqrt(groups) if groups > 1 else math.inf
    return paired_interval([float(value) for value in differences_S], error, groups)


@dataclass(frozen=True)
class BlockValues:
    """One token quantity, block by block: its mean, or its largest values."""

    values: tuple[tuple[float, ...], ...]
    """For each block its mean, or in any order all its values above one threshold common to the blocks."""
    tokens_B: tuple[int, ...]
    """Tokens of each block, those below the threshold included."""

    def quantile(self, level: float) -> float:
        """The smallest kept value with at most (1 − level)·N tokens above it; NaN where too few values were kept."""
        whole_B, once_11 = np.zeros(len(self.tokens_B), dtype=np.int64), np.ones((1, 1), dtype=np.int64)
        return float(resampled(self, whole_B, once_11, level)[0])


def block_values(blocks: ValidationBlocks | None, key: str, *, tail: bool) -> BlockValues | None:
    """A tail or a mean of one run by its key; None if the run does not have it for every block."""
    if blocks is None:
        return None
    if tail:
        return BlockValues(blocks.tails[key], blocks.tokens) if key in blocks.tails else None
    means = blocks.means.get(key, ())
    known = tuple((mean,) for mean in means if mean is not None)
    return BlockValues(known, blocks.tokens) if known and len(known) == len(means) else None


def violations(blocks: ValidationBlocks | None, coordinate: str, target: float) -> BlockValues | None:
    """The tail of |log Z − c| for any c, from the tails of log Z and −log Z; None if the run does not have them."""
    tails = {} if blocks is None else blocks.tails
    high_B, low_B = tails.get(f"{LOG_Z}.{coordinate}"), tails.get(f"{MINUS_LOG_Z}.{coordinate}")
    if blocks is None or high_B is None or low_B is None:
        return None
    if not any(high_B) or not any(low_B):
        return BlockValues(((),) * len(blocks.tokens), blocks.tokens)
    least = min(map(min, filter(None, high_B)))
    greatest = -min(map(min, filter(None, low_B)))
    # A token counts once. Where the ends overlap, every token above `least` is at the high end, every other one at the low end.
    overlap = least < greatest
    ends_B = (
        (*(x for x in high if x > least or not overlap), *(-x for x in low if -x < least or (overlap and -x == least)))
        for high, low in zip(high_B, low_B, strict=True)
    )
    # Every token farther from c than this is at one of the ends.
    kept = max(least - target, target - greatest)
    values = tuple(tuple(abs(x - target) for x in ends if abs(x - target) >= kept) for ends in ends_B)
    return BlockValues(values, blocks.tokens)


def mean_over_tokens(means_B: Sequence[float | None], tokens_B: Sequence[int]) -> float | None:
    """Mean over tokens of a mean by block; None if one block has none."""
    known = [mean for mean in means_B if mean is not None]
    if not known or len(known) < len(tokens_B):
        return None
    return sum(mean * count for mean, count in zip(known, tokens_B, strict=True)) / sum(tokens_B)


def judged_level(tokens: int, wanted: float = QUANTILES[0]) -> float | None:
    """The highest of 99.9, 99 and 95 %, up to `wanted`, with at least 50 tokens beyond it; None if even 95 % has fewer."""
    return next((level for level in QUANTILES if level <= wanted and (1 - level) * tokens >= BEYOND - 1e-9), None)


def effect_interval(pairs_S: Sequence[tuple[BlockValues, BlockValues]], level: float | None) -> PairedInterval | None:
    """log(q_method / q_baseline) ± h over (baseline, method) pairs; None if q is not positive or cannot be read."""
    group_B, drawn_RG = text_resamples(len(pairs_S[0][0].tokens_B))
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


def text_resamples(blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(group of every block [B], how often each resample draws each group [R, G]); the same for the same text."""
    group_B = contiguous_groups(blocks)
    groups = int(group_B.max()) + 1
    return group_B, np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), size=RESAMPLES)


@np.errstate(divide="ignore", invalid="ignore")
def resampled(
    values: BlockValues, group_B: NDArray[np.int64], counts_RG: NDArray[np.int64], level: float | None
) -> NDArray[np.float64]:
    """The quantile (the mean without `level`) of every resample, [R]; `counts_RG` says how often each group was drawn."""
    tokens_B = np.asarray(values.tokens_B, dtype=np.float64)
    tokens_R = counts_RG @ group_sums(tokens_B, group_B)
    kept_K = np.array([value for block in values.values for value in block], dtype=np.float64)
    if level is None:
        return counts_RG @ group_sums(kept_K * tokens_B, group_B) / tokens_R
    out_R = np.full(len(counts_RG), np.nan)
    if not len(kept_K):
        return out_R
    order = np.argsort(kept_K)[::-1]
    group_K, largest_K = np.repeat(group_B, [len(block) for block in values.values])[order], kept_K[order]
    step = max(1, MOST_NUMBERS // len(kept_K))
    for start in range(0, len(counts_RG), step):
        part = slice(start, start + step)
        above_RK = np.cumsum(counts_RG[part][:, group_K], axis=1)
        found_RK = above_RK > ((1 - level) * tokens_R[part])[:, None]
        out_R[part] = np.where(found_RK[:, -1], largest_K[found_RK.argmax(axis=1)], np.nan)
    return out_R
