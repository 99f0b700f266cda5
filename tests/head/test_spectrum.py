"""The leading part of the gain: exact and randomized spectra against eq:ap_svd, with p itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zloss.head.spectrum import POWER_ITERATIONS, RANK, head_spectra, leading_part
from zloss.results.options import SvdMethod

V, D, T = 400, 60, 50


def decaying_head(rows: int = V, width: int = D) -> Tensor:
    """A head whose singular values fall slowly, so that a randomized decomposition is visibly not the exact one."""
    torch.manual_seed(3)
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
    count = min(rows, width)
    sigma = 40 * torch.arange(1, count + 1, dtype=torch.float64) ** -0.3
    return left[:, :count] * sigma @ right[:, :count].T + 0.5


def softmaxes(rows: int = V) -> Tensor:
    torch.manual_seed(4)
    return torch.softmax(3 * torch.randn(T, rows, dtype=torch.float64), dim=-1)


def part(weight_VD: Tensor, p_TV: Tensor, method: SvdMethod, *, centered: bool = False) -> Tensor:
    """What the audit computes from Wᵀp."""
    spectrum = head_spectra(weight_VD, method=method)[int(centered)]
    projected = p_TV @ weight_VD - (weight_VD.mean(dim=0) if centered else 0)
    return leading_part(projected, projected.norm(dim=1) / p_TV.norm(dim=1), spectrum)


def by_left_vectors(left_VK: Tensor, sigma_K: Tensor, p_TV: Tensor) -> Tensor:
    """Σ_j σ_j²⟨q, u_j⟩² with q = p/‖p‖, as eq:ap_svd writes it."""
    q_TV = p_TV / p_TV.norm(dim=1, keepdim=True)
    return ((q_TV @ left_VK) * sigma_K).square().sum(dim=1)


@pytest.mark.parametrize("centered", [False, True])
def test_the_exact_part_is_that_of_the_left_singular_vectors(centered: bool) -> None:
    weight, p = decaying_head(), softmaxes()
    left, sigma, _ = torch.linalg.svd(weight - weight.mean(dim=0) if centered else weight, full_matrices=False)
    truth = by_left_vectors(left[:, :RANK], sigma[:RANK], p)
    torch.testing.assert_close(part(weight, p, "exact", centered=centered), truth, rtol=1e-9, atol=0)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(V, D), (40, 60), (V, 10)])
def test_the_randomized_part_uses_left_vectors(rows: int, width: int, centered: bool) -> None:
    """It was taken from the right vectors, which are one half step of the power iteration ahead of the left ones."""
    weight, p = decaying_head(rows, width), softmaxes(rows)
    target = weight - weight.mean(dim=0) if centered else weight
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, sigma, right = torch.svd_lowrank(target, q=min(RANK, rows, width), niter=POWER_ITERATIONS)
    truth = by_left_vectors(left, sigma, p)
    found = head_spectra(weight, method="randomized")[int(centered)]
    torch.testing.assert_close(found.sigma, sigma, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(part(weight, p, "randomized", centered=centered), truth, rtol=1e-6, atol=1e-12)
    if rows > width > RANK:
        from_right = (p @ target @ right).square().sum(dim=1) / p.square().sum(dim=1)
        assert float((from_right / truth - 1).abs().max()) > 1e-3


def test_a_head_of_low_rank_has_its_whole_gain_in_the_leading_directions() -> None:
    torch.manual_seed(5)
    weight, p = torch.randn(V, 3, dtype=torch.float64) @ torch.randn(3, D, dtype=torch.float64), softmaxes()
    gain = (p @ weight).square().sum(dim=1) / p.square().sum(dim=1)
    for method in ("exact", "randomized"):
        torch.testing.assert_close(part(weight, p, method), gain, rtol=1e-9, atol=0)
    assert float(part(torch.zeros_like(weight), p, "randomized").sum()) == 0


def test_the_part_was_larger_than_the_whole_next_to_a_large_mean_row() -> None:
    """In fp32 the centered Wᵀp is then mostly rounding, which differed between the part and the whole."""
    weight, p = decaying_head(V, 10).float() + 1e4, softmaxes().float()
    spectrum = head_spectra(weight, method="exact")[1]
    centered = p @ weight - weight.mean(dim=0)
    gain = centered.norm(dim=1) / p.norm(dim=1) * (1 + 1e-4 * torch.linspace(-1, 1, T))  # of another order of summation
    assert torch.all(leading_part(centered, gain, spectrum) <= gain.square() * (1 + 1e-5))
