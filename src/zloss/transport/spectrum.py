"""Singular spectrum of an output head, raw and row-centered, and the gain's share in its leading directions.

Exact by default: the eigenvalues of the D×D Gram matrix WᵀW in fp64, centered by WᵀW − V·w̄w̄ᵀ, so that the centered head
is never formed. The paper's randomized rank-16 decomposition with four power iterations is the alternative.

Axes: V vocabulary, D width, K leading directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.results.choices import SvdMethod

RANK = 16
POWER_ITERATIONS = 4
_ROWS = 8192
"""Rows converted to fp64 at a time."""


@dataclass(frozen=True)
class HeadSpectrum:
    """Singular values σ (descending) and the right singular vectors of the K = 16 leading ones."""

    sigma: Tensor
    """All min(V, D) of them when exact, the first 16 when randomized; fp64."""
    energy: float
    """‖W‖_F² = Σ σ²."""
    directions_DK: Tensor
    method: SvdMethod

    @property
    def sigma_1(self) -> float:
        return float(self.sigma[0])

    def share(self, rank: int) -> float | None:
        """E_k: the part of ‖W‖_F² in the first k directions; None for a zero head."""
        return float((self.sigma[:rank] ** 2).sum()) / self.energy if self.energy > 0 else None


@torch.no_grad()
def head_spectra(
    weight_VD: Tensor, *, logit_scale: float = 1.0, method: SvdMethod = "exact", seed: int = 0
) -> tuple[HeadSpectrum, HeadSpectrum]:
    """(raw, centered) spectra of logit_scale·W."""
    if method == "randomized":
        return _randomized(weight_VD, logit_scale, seed, centered=False), _randomized(
            weight_VD, logit_scale, seed, centered=True
        )
    gram_DD, mean_D = gram_and_mean(weight_VD)
    rows = weight_VD.shape[0]
    scale = logit_scale**2
    return tuple(_from_gram(scale * gram) for gram in (gram_DD, gram_DD - rows * torch.outer(mean_D, mean_D)))  # type: ignore[return-value]


def gram_and_mean(weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """WᵀW and w̄ in fp64, a block of rows at a time."""
    width = weight_VD.shape[1]
    gram_DD = torch.zeros(width, width, dtype=torch.float64, device=weight_VD.device)
    total_D = torch.zeros(width, dtype=torch.float64, device=weight_VD.device)
    for start in range(0, weight_VD.shape[0], _ROWS):
        rows = weight_VD[start : start + _ROWS].double()
        gram_DD.addmm_(rows.T, rows)
        total_D += rows.sum(dim=0)
    return gram_DD, total_D / weight_VD.shape[0]


def _from_gram(gram_DD: Tensor) -> HeadSpectrum:
    values, vectors = torch.linalg.eigh(gram_DD)
    # Rounding can push the zero eigenvalue of a centered head slightly below zero.
    values = values.clamp_min(0).flip(0)
    return HeadSpectrum(values.sqrt(), float(values.sum()), vectors.flip(1)[:, :RANK].contiguous(), "exact")


def _randomized(weight_VD: Tensor, logit_scale: float, seed: int, *, centered: bool) -> HeadSpectrum:
    weight = logit_scale * (weight_VD if weight_VD.dtype == torch.float64 else weight_VD.float())
    if centered:
        weight = weight - weight.mean(dim=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, sigma, directions = torch.svd_lowrank(weight, q=min(RANK, *weight.shape), niter=POWER_ITERATIONS)
    energy = float(weight.double().square().sum())
    return HeadSpectrum(sigma.double(), energy, directions.double(), "randomized")


def leading_part(projected_TD: Tensor, p_norm_T: Tensor, spectrum: HeadSpectrum) -> Tensor:
    """‖V₁₆ᵀ Wᵀp‖² / ‖p‖²: the part of a² in the leading directions, from the Wᵀp that is already there."""
    directions = spectrum.directions_DK.to(projected_TD)
    return (projected_TD @ directions).square().sum(dim=1) / p_norm_T.square()
