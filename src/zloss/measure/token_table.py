"""What an audit knows of every token of a batch, in raw and centered coordinates.

Axes: T tokens, D width, K = 16 leading directions. All in compute precision (fp32, fp64 for an fp64 model).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.measure.measurement import Measurement
from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_chunks import iterate_head_chunks
from zloss.transport.head_problem import HeadProblem
from zloss.transport.spectrum import HeadSpectrum, leading_part


@dataclass(frozen=True)
class Coordinate:
    """Token quantities in one coordinate of the logits."""

    log_z: Tensor
    violation: Tensor
    """|log Z − c|."""
    gain: Tensor
    row_max: Tensor
    mu: Tensor | None
    """Raw: μ. Centered: the measured residual of the common shift."""
    delta_z: Tensor
    """‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖."""
    leading: Tensor
    """The part of gain² in the 16 leading directions of the head."""
    plane: Tensor | None
    """[T, 2]: hidden-source shape in the plane of the gradient-geometry figure."""

    @property
    def delta_u(self) -> Tensor:
        """‖δ_u‖ = A_p·‖δ_z‖."""
        return self.gain * self.delta_z


@dataclass(frozen=True)
class TokenTable:
    """One chunk of tokens of an audit."""

    tokens: slice
    ce: Tensor
    p_norm: Tensor
    raw: Coordinate
    centered: Coordinate | None


def shaped_chunks(problem: HeadProblem) -> Iterator[tuple[HeadChunk, Tensor]]:
    """Chunks with their hidden-source shapes Wᵀp of the scaled head, [C, D]."""
    for chunk in iterate_head_chunks(problem, back_projection=True):
        assert chunk.projected_CD is not None
        yield chunk, chunk.projected_CD * (problem.options.logit_scale / chunk.rows.sums.sum_C).unsqueeze(1)


@torch.no_grad()
def token_tables(
    measurement: Measurement, hidden_TD: Tensor, target_T: Tensor, plane_2D: Tensor | None
) -> Iterator[TokenTable]:
    """Token quantities chunk by chunk; raw and centered come out of the same two products."""
    problem = measurement.problem(hidden_TD, target_T)
    for chunk, shape_CD in shaped_chunks(problem):
        stats = chunk.stats
        assert stats.p_norm is not None
        assert stats.gain is not None
        ce = chunk.injection.cross_entropy
        raw = _coordinate(
            measurement,
            stats.log_z,
            stats.gain,
            stats.row_max,
            stats.mu,
            stats.p_norm,
            shape_CD,
            measurement.spectra[0],
            plane_2D,
        )
        centered = None
        if stats.mu is not None and stats.gain_centered is not None and stats.log_z_centered is not None:
            centered = _coordinate(
                measurement,
                stats.log_z_centered,
                stats.gain_centered,
                stats.row_max - stats.mu,
                stats.mu_residual,
                stats.p_norm,
                shape_CD - measurement.mean_row_D.to(shape_CD),
                measurement.spectra[1],
                plane_2D,
            )
        yield TokenTable(chunk.tokens, ce, stats.p_norm, raw, centered)


def _coordinate(
    measurement: Measurement,
    log_z: Tensor,
    gain: Tensor,
    row_max: Tensor,
    mu: Tensor | None,
    p_norm: Tensor,
    shape_CD: Tensor,
    spectrum: HeadSpectrum,
    plane_2D: Tensor | None,
) -> Coordinate:
    violation = (log_z - measurement.target).abs()
    return Coordinate(
        log_z=log_z,
        violation=violation,
        gain=gain,
        row_max=row_max,
        mu=mu,
        delta_z=2 * measurement.coef * violation * p_norm,
        leading=leading_part(shape_CD, p_norm, spectrum),
        plane=None if plane_2D is None else shape_CD @ plane_2D.to(shape_CD).T,
    )


@torch.no_grad()
def geometry_plane(measurement: Measurement, hidden_TD: Tensor, target_T: Tensor) -> Tensor | None:
    """[2, D]: w̄/‖w̄‖, and the leading principal direction of the centered hidden-source cloud orthogonal to it.

    None where the mean row vanishes: then there is no first axis.
    """
    first = measurement.mean_row_D.double()
    if measurement.head.softcap is not None or not first.norm() > 0 or first.numel() < 2:
        return None
    first = first / first.norm()
    problem = measurement.problem(hidden_TD, target_T)
    cloud = torch.nan_to_num(torch.cat([shape_CD.double() for _, shape_CD in shaped_chunks(problem)]))
    cloud = cloud - cloud.mean(dim=0)
    cloud = cloud - torch.outer(cloud @ first, first)
    second = torch.linalg.eigh(cloud.T @ cloud).eigenvectors[:, -1]
    # A singular vector has no sign of its own: the largest entry is made positive, so that figures can be compared.
    return torch.stack([first, second * torch.sign(second[second.abs().argmax()])])
