"""Validation block by block: what a verdict on a run needs beside the means over all tokens.

Blocks are contiguous pieces of the validation text, in its order. Two runs on the same text have the same blocks, so a
difference can be taken block by block and the text resampled in groups of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zloss.errors import InputError
from zloss.results.record import NATS, NOT_NEGATIVE

VIOLATION = "violation"
"""|log Z − c|; the coordinate follows, `violation.raw`, as after the next three."""
SHIFT = "shift"
"""|μ|; centered: the measured residual."""
DELTA_U = "delta_u"
"""‖δ_u‖ at λ_diag."""
DELTA_U_GAIN_AWARE = "delta_u_gain_aware"
"""‖δ_u‖ at λ_diag under gain-aware weighting with the run's β."""
GAIN = "gain"
"""A_p; kept for drift, not for runs."""
SHIFT_SQUARED = "shift_squared"
"""μ²."""
VIOLATION_SQUARED = "violation_squared"
"""(log Z − c)²."""


@dataclass(frozen=True)
class ValidationBlocks:
    """Per-block numbers of one run.

    A tail holds the K largest values of a quantity over *all* validation tokens, sorted into their blocks: one threshold is
    common to the blocks. A threshold of each block alone (its own 95 % quantile) would lose values of blocks with many
    large ones; with the common one the pooled p99 and p99.9 of a resample of blocks are exact as long as the resample
    needs no value below the threshold.
    """

    tokens: tuple[int, ...]
    """Predictions of each block."""
    ce: tuple[float | None, ...] = field(metadata=NATS)
    """Mean cross-entropy of each block, in nats per token; None where one of its tokens is not finite."""
    kept: int = field(default=0, metadata=NOT_NEGATIVE)
    """K: values kept of every tail."""
    tails: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict, metadata=NOT_NEGATIVE)
    """Quantity and coordinate (`violation.raw`) → for each block its values among the K largest, largest first."""
    means: dict[str, tuple[float | None, ...]] = field(default_factory=dict, metadata=NOT_NEGATIVE)
    """`shift_squared.raw`, `violation_squared.raw` and `violation_squared.centered` → mean over the tokens of each block."""

    def __post_init__(self) -> None:
        lengths = {"ce": len(self.ce)} | {name: len(found) for name, found in {**self.tails, **self.means}.items()}
        for name, length in lengths.items():
            if length != len(self.tokens):
                raise InputError(
                    f"`{name}` is expected to have one entry for each of the {len(self.tokens)} blocks in `tokens`, but has "
                    f"{length}."
                )
        if any(count < 1 for count in self.tokens):
            raise InputError(
                f"`tokens` is expected to have at least 1 prediction per block, but has {min(self.tokens)}."
            )


def kept_values(tokens: int) -> int:
    """K for `tokens` validation tokens: the largest 5 %, at least 500 values, and 2 % beyond a million tokens.

    With fewer than 5000 tokens the p95 is judged, and a resample can need values below it: 500 values are then at least
    10 % of the tokens.
    """
    share = 0.05 if tokens <= 1_000_000 else 0.02
    return max(int(share * tokens), min(tokens, 500))
