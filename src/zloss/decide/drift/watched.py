"""The watched numbers: where the noise of each comes from, and the smallest change that counts."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.drift.limits import DriftLimits
from zloss.results.coordinate import Coordinate
from zloss.results.validation_blocks import GAIN, SHIFT, SHIFT_SQUARED, VIOLATION


@dataclass(frozen=True)
class Watched:
    """One number of `DriftNumbers` in one coordinate."""

    key: str
    coordinate: Coordinate
    limit: str | None
    """Name of its smallest change among `DriftLimits`; None for the ratio alone."""
    tail: str | None = None
    """The token quantity whose quantile it is."""
    quantile: float | None = None
    """That quantile."""
    mean: str | None = None
    """The token quantity of whose mean it is the square root. A number with neither does not depend on tokens, or is not
    known block by block: its noise over the text is taken as 0."""

    def least_change(self, limits: DriftLimits) -> float:
        """The absolute part of the limit."""
        return 0.0 if self.limit is None else float(getattr(limits, self.limit))


def _both(key: str, limit: str | None, tail: str | None = None, quantile: float | None = None) -> tuple[Watched, ...]:
    coordinates: tuple[Coordinate, ...] = ("raw", "centered")
    return tuple(
        Watched(key, coordinate, limit, None if tail is None else f"{tail}.{coordinate}", quantile)
        for coordinate in coordinates
    )


WATCHED: tuple[Watched, ...] = (
    # A centered μ is rounding noise.
    Watched("mu_abs_99", "raw", "least_nats", tail=f"{SHIFT}.raw", quantile=0.99),
    Watched("mu_rms", "raw", "least_nats", mean=f"{SHIFT_SQUARED}.raw"),
    *_both("p_z_999", "least_nats", VIOLATION, 0.999),
    *_both("a_p_99", "least_gain", GAIN, 0.99),
    *_both("sigma_1", None),
    *_both("e_1", "least_share"),
    *_both("r_z", "least_r_z"),
)
"""In the order in which findings are told: the common shift first, because the raw numbers below follow it."""
SHIFT_KEYS = ("mu_abs_99", "mu_rms")
"""Numbers of the common shift. They exist in raw logits only: centered, they are rounding noise."""
