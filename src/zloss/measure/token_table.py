"""What is measured of every token of a chunk, in raw and centered coordinates.

Axes: T tokens, C tokens of a chunk, D width. All in compute precision (fp32, fp64 for an fp64 model).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.head.spectrum import leading_part
from zloss.measure.hidden_source import ShapedTokens, shaped_chunks
from zloss.measure.measurement import Measurement
from zloss.results.coordinate import Coordinate
from zloss.statistics import TokenStats


@dataclass(frozen=True)
class TokensInCoordinate:
    """Quantities of the tokens of a chunk in one coordinate of the logits, each [C] unless stated.

    Scaling: per token, before any reduction; λ_diag is included in the sources.
    """

    log_z: Tensor
    violation: Tensor
    """|log Z − c|."""
    gain: Tensor
    """A_p."""
    row_max: Tensor
    """max_i z_i."""
    mu: Tensor | None
    """Raw: μ. Centered: the measured residual of the common shift. None where μ does not exist."""
    delta_z: Tensor
    """‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖."""
    delta_u: Tensor
    """‖δ_u‖ = A_p·‖δ_z‖."""
    delta_u_gain_aware: Tensor
    """‖δ_u‖ / (1 + β·A_p²)."""
    leading: Tensor
    """The part of A_p² in the 16 leading directions of the head."""


@dataclass(frozen=True)
class TokenTable:
    """One chunk of tokens."""

    tokens: slice
    """Their places in the batch."""
    ce: Tensor
    """−log p(target), nats."""
    raw: TokensInCoordinate
    centered: TokensInCoordinate | None
    """None where μ does not exist."""
    shaped: ShapedTokens
    """Statistics and Wᵀp of the raw head."""

    def tokens_in(self, coordinate: Coordinate) -> TokensInCoordinate | None:
        """The quantities in one coordinate."""
        return self.raw if coordinate == "raw" else self.centered


@torch.no_grad()
def token_tables(measurement: Measurement, hidden_TD: Tensor, target_T: Tensor) -> Iterator[TokenTable]:
    """Token quantities chunk by chunk; both coordinates are read from the same two products with the head."""
    problem = measurement.problem(hidden_TD, target_T)
    for chunk, shape_CD in shaped_chunks(problem):
        assert isinstance(chunk.tokens, slice)  # a measurement holds all its tokens
        yield TokenTable(
            chunk.tokens,
            chunk.loss.cross_entropy,
            _raw(measurement, chunk.stats, shape_CD),
            _centered(measurement, chunk.stats, shape_CD),
            ShapedTokens.of_chunk(chunk, shape_CD),
        )


def _raw(measurement: Measurement, stats: TokenStats, shape_CD: Tensor) -> TokensInCoordinate:
    assert stats.gain is not None
    return _tokens(
        measurement, "raw", shape_CD, p_norm=stats.p_norm, log_z=stats.log_z, gain=stats.gain,
        row_max=stats.row_max, mu=stats.mu,
    )  # fmt: skip


def _centered(measurement: Measurement, stats: TokenStats, shape_CD: Tensor) -> TokensInCoordinate | None:
    if stats.mu is None or stats.gain_centered is None or stats.log_z_centered is None:
        return None
    shape_CD = shape_CD - measurement.mean_row_D.to(shape_CD)
    return _tokens(
        measurement, "centered", shape_CD, p_norm=stats.p_norm, log_z=stats.log_z_centered,
        gain=stats.gain_centered, row_max=stats.row_max - stats.mu, mu=stats.mu_residual,
    )  # fmt: skip


def _tokens(
    measurement: Measurement,
    coordinate: Coordinate,
    shape_CD: Tensor,
    *,
    p_norm: Tensor | None,
    log_z: Tensor,
    gain: Tensor,
    row_max: Tensor,
    mu: Tensor | None,
) -> TokensInCoordinate:
    assert p_norm is not None  # the measurement asks for every statistic
    violation = (log_z - measurement.target).abs()
    delta_z = 2 * measurement.coef * violation * p_norm
    delta_u = gain * delta_z
    return TokensInCoordinate(
        log_z=log_z,
        violation=violation,
        gain=gain,
        row_max=row_max,
        mu=mu,
        delta_z=delta_z,
        delta_u=delta_u,
        delta_u_gain_aware=delta_u / (1 + measurement.gain_beta * gain**2),
        leading=leading_part(shape_CD, p_norm, measurement.spectrum(coordinate)),
    )
