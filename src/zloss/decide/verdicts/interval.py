"""An interval for the mean paired difference over seeds, with the spread of the validation text inside each seed.

    h² = (t·sd(d_s)/√S)² + (t′·e)²

d_s is the difference at seed s (S of them), t and t′ are the one-sided 95 % quantiles of Student's t with S − 1 and
G − 1 degrees of freedom, and e is the standard error of the seed-averaged difference over G groups of validation blocks.
Two one-sided tests at 5 % then read: an upper bound holds if Δ + h is below it, and fails if Δ − h is above it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from zloss.errors import MissingDependencyError

LEVEL = 0.95
LARGEST_EXPONENT = 700.0
"""Beyond it exp is infinite in fp64."""
MOST_SEEDS = 200
"""More seeds than this are not proposed."""


@dataclass(frozen=True)
class PairedInterval:
    """Δ ± h of a paired difference; `half_width` is None with one seed, whose spread is unknown."""

    difference: float
    half_width: float | None
    seeds: int
    groups: int
    seed_part: float | None
    """t·sd(d_s)/√S."""
    group_part: float
    """t′·e."""
    seed_spread: float | None
    """sd(d_s)."""

    @property
    def lower(self) -> float | None:
        return None if self.half_width is None else self.difference - self.half_width

    @property
    def upper(self) -> float | None:
        return None if self.half_width is None else self.difference + self.half_width

    def seeds_to_settle(self, bound: float) -> int | None:
        """How many seeds would put Δ on one side of `bound` at the present spread.

        None with one seed, and where more seeds cannot help because the groups alone are as wide as the gap.
        """
        gap = abs(bound - self.difference)
        if self.seed_spread is None or self.group_part >= gap:
            return None
        for seeds in range(2, MOST_SEEDS + 1):
            part = student_quantile(seeds - 1) * self.seed_spread / math.sqrt(seeds)
            if math.hypot(part, self.group_part) <= gap:
                return seeds
        return None


def paired_interval(differences_S: Sequence[float], group_error: float, groups: int) -> PairedInterval:
    """The interval of the mean of `differences_S`; `group_error` is e, from `groups` groups of validation blocks.

    `groups` = 0 says that the spread over text is unknown or does not exist: e is then left out.
    """
    seeds, mean = len(differences_S), statistics.fmean(differences_S)
    group_part = 0.0 if not groups else student_quantile(groups - 1) * group_error if groups > 1 else math.inf
    if seeds < 2:
        return PairedInterval(mean, None, seeds, groups, None, group_part, None)
    spread = statistics.stdev(differences_S)
    seed_part = student_quantile(seeds - 1) * spread / math.sqrt(seeds)
    return PairedInterval(mean, math.hypot(seed_part, group_part), seeds, groups, seed_part, group_part, spread)


@cache
def student_quantile(degrees: int) -> float:
    """The one-sided 95 % quantile of Student's t."""
    try:
        from scipy.stats import t
    except ImportError as error:
        raise MissingDependencyError("scipy", "Judging a comparison", "audit") from error
    return float(t.ppf(LEVEL, degrees))
