"""Singular spectrum of an output head, raw and row-centered, and the gain's share in its leading directions.

Exact by default: the eigenvalues of the D×D Gram matrix WᵀW in fp64, centered by WᵀW − V·w̄w̄ᵀ, so that the centered head
is never formed. The paper's randomized rank-16 decomposition with four power iterations is the alternative.

The share of a token's gain is a² = Σ_j σ_j²⟨q, u_j⟩² with q = p/‖p‖ and the left singular vectors u_j (paper eq:ap_svd).
Neither way needs a product with the V-wide p: the left vectors lie in the range of W, so σ_j⟨p, u_j⟩ = d_j·Wᵀp for a vector
d_j of D numbers, and Wᵀp is already there. For an exact decomposition d_j is the right singular vector.

Axes: V vocabulary, D width, K leading directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.results.options import SvdMethod
from zloss.tensors import at_least_fp32

RANK = 16
POWER_ITERATIONS = 4
_ROWS = 8192
"""Rows converted to fp64 at a time."""


@dataclass(frozen=True)
class HeadSpectrum:
    """Singular values σ (descending), and the K = 16 leading directions of the gain."""

    sigma: Tensor
    """All min(V, D) of them when exact, the first 16 when randomized; fp64."""
    energy: float
    """‖W‖_F² = Σ σ²."""
    directions_DK: Tensor
    """Columns d_j with d_j·Wᵀp = σ_j⟨p, u_j⟩ for every p; the right singular vectors when exact."""
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
    weight = logit_scale * at_least_fp32(weight_VD)
    if centered:
        weight = weight - weight.mean(dim=0)
    rank = min(RANK, *weight.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        input_DK = torch.randn(min(weight.shape), rank, dtype=weight.dtype, device=weight.device)
    wide = weight.shape[0] < weight.shape[1]
    # The steps of `torch.svd_lowrank` (Halko et al., 2009, algorithms 4.4 and 5.1), which does not return R.
    tall = weight.T if wide else weight
    for iteration in range(POWER_ITERATIONS + 1):
        basis_VK, triangle_KK = torch.linalg.qr(tall @ input_DK)
        if iteration < POWER_ITERATIONS:
            input_DK = torch.linalg.qr(tall.T @ basis_VK).Q
    left_KK, sigma, _ = torch.linalg.svd(basis_VK.T @ tall, full_matrices=False)
    if wide:
        # The basis is one of the rows: its vectors are right singular vectors v_j, and u_j = W v_j / σ_j.
        directions_DK = basis_VK @ left_KK
    else:
        # basis = W·input·R⁻¹, so the left vectors u = basis·left are W·(input·R⁻¹·left).
        directions_DK = input_DK @ torch.linalg.pinv(triangle_KK) @ left_KK * sigma
    energy = float(weight.double().square().sum())
    return HeadSpectrum(sigma.double(), energy, directions_DK.double(), "randomized")


def leading_part(projected_TD: Tensor, gain_T: Tensor, spectrum: HeadSpectrum) -> Tensor:
    """Σ_j σ_j²⟨p, u_j⟩² / ‖p‖² over the leading directions: their part of a² (paper eq:ap_svd), from Wᵀp.

    As a share of ‖Wᵀp‖², so that it does not exceed a² where the mean row is large and Wᵀp − w̄ is mostly rounding.
    """
    directions = spectrum.directions_DK.to(projected_TD)
    share_T = (projected_TD @ directions).square().sum(dim=1) / projected_TD.square().sum(dim=1).clamp_min(
        torch.finfo(projected_TD.dtype).tiny
    )
    return share_T * gain_T.square()
