"""When a number of a head counts as moved, and when cross-entropy counts as still.

The paper does not judge checkpoints of one run against each other: these numbers are ours, each with its reason.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from zloss.errors import InputError


@dataclass(frozen=True)
class DriftLimits:
    """Limits of `zloss drift`."""

    ppl_tolerance: float = 0.01
    """CE is still between two checkpoints when the 95 % interval of its paired change stays within this share of PPL: the
    tolerance of the quality gate."""
    least_ratio: float = 0.1
    """A number moves only when it changes by more than this share of the smaller of its two values, its noise over the text
    subtracted."""
    least_nats: float = 1.0
    """p99 |μ|, rms μ and P_Z^99.9 move only when they change by more than this, in nats: at λ = 1e-4 a violation of one nat
    adds 1e-4 nat to the loss."""
    least_gain: float = 1.0
    """A_p^99 moves only when it changes by more than this: a tenth of the gain at which the transport stage fires."""
    least_r_z: float = 0.005
    """R_Z moves only when it changes by more than this: a tenth of the R_Z budget."""
    least_share: float = 0.01
    """E_1 moves only when it changes by more than this share of the head's energy."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"`{field.name}` is expected to be a finite number ≥ 0, but got {value!r}.")

    @property
    def ce_tolerance(self) -> float:
        """`ppl_tolerance` in nats of CE: log(1 + share)."""
        return math.log1p(self.ppl_tolerance)

    def to_dict(self) -> dict[str, float]:
        """Name → value, as drift.json stores them."""
        return dict(asdict(self))
