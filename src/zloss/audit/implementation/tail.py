"""Mean, p99 and maximum of a per-token error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zloss.streaming import Moments, Quantiles


@dataclass(frozen=True)
class Tail:
    """Over tokens; None without any. A value that is not finite enters nothing but its count."""

    mean: float | None
    median: float | None
    p99: float | None
    maximum: float | None
    nonfinite: int = 0


class TailTally:
    """Collects a per-token quantity chunk by chunk."""

    def __init__(self) -> None:
        self._moments, self._quantiles = Moments(), Quantiles()

    def update(self, values_T: Any) -> None:
        self._moments.update(values_T)
        self._quantiles.update(values_T)

    def tail(self) -> Tail:
        p50, p99 = self._quantiles.quantile(0.5), self._quantiles.quantile(0.99)
        return Tail(
            mean=self._moments.mean,
            median=None if p50 is None else p50.value,
            p99=None if p99 is None else p99.value,
            maximum=self._moments.maximum,
            nonfinite=self._quantiles.counts.nonfinite,
        )
