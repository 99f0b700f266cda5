"""Every proposition, corollary and identity of the paper as a named test, in fp64 on random instances.

`docs/paper_map.md` lists which equation is tested where; tests/test_paper_map.py keeps that list true.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zloss
from tests.laws.definitions import relative_error

TOL = 1e-12
V, D, T, LAMBDA, C = 31, 7, 11, 0.3, 1.9


@pytest.fixture(params=range(3))
def g(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(request.param)


def normal(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def z_loss(z: Tensor, coef: float = LAMBDA, target: float = C) -> Tensor:
    return coef * (torch.logsumexp(z, -1) - target) ** 2


def grad(value: Tensor, at: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), at)[0]


def test_source_is_amplitude_times_softmax(g: torch.Generator) -> None:
    """eq:source, and ‖δ‖ = 2√(λ L_Z)·‖p‖."""
    z = normal(g, T, V, scale=3).requires_grad_()
    source, p = grad(z_loss(z), z), torch.softmax(z, -1)
    assert relative_error(zloss.z_loss_source(z, LAMBDA, C, "sum"), source) < TOL
    assert relative_error(source.norm(dim=-1), 2 * (LAMBDA * z_loss(z)).sqrt() * p.norm(dim=-1)) < TOL


def test_common_shift_sensitivity(g: torch.Generator) -> None:
    """Proposition 1: L_Z(z + a1) = λ(log Z + a − c)², with gradient 2λ(log Z + a − c)·softmax(z)."""
    z, a = normal(g, T, V).requires_grad_(), 4.2
    log_z = torch.logsumexp(z, -1)
    assert relative_error(z_loss(z + a), LAMBDA * (log_z + a - C) ** 2) < TOL
    want = 2 * LAMBDA * (log_z + a - C).unsqueeze(-1) * torch.softmax(z, -1)
    assert relative_error(grad(z_loss(z + a), z), want) < TOL


def test_cross_entropy_is_blind_to_a_common_shift(g: torch.Generator) -> None:
    """eq:ce_shift_direction and eq:z_shift_direction: 1ᵀ(p − y) = 0, while 1ᵀδᶻ = 2λ(log Z + a − c)."""
    z = normal(g, T, V).requires_grad_()
    y = torch.randint(V, (T,), generator=g)
    ce = nn.functional.cross_entropy(z, y, reduction="none")
    assert grad(ce, z).sum(-1).abs().max() < TOL
    shifted = (z.detach() + 4.2).requires_grad_()
    along_one = grad(z_loss(shifted), shifted).sum(-1)
    assert relative_error(along_one, 2 * LAMBDA * (torch.logsumexp(z, -1) + 4.2 - C)) < TOL


def test_centering_preserves_softmax_and_ce(g: torch.Generator) -> None:
    """Proposition 2 and eq:centered_head; log Z = μ + log Z̃."""
    weight, u = normal(g, V, D) + normal(g, D), normal(g, T, D)
    z = u @ weight.T
    centered = u @ (weight - weight.mean(0)).T
    assert relative_error(torch.softmax(centered, -1), torch.softmax(z, -1)) < TOL
    mu = u @ weight.mean(0)
    assert relative_error(torch.logsumexp(z, -1), mu + torch.logsumexp(centered, -1)) < TOL


def test_raw_minus_centered_source_in_general(g: torch.Generator) -> None:
    """eq:removed_source_general with different coefficients and targets in the two coordinates."""
    z = normal(g, T, V, scale=2) + 3
    mu, p = z.mean(-1, keepdim=True), torch.softmax(z, -1)
    raw = zloss.z_loss_source(z, 0.3, 1.9, "sum")
    centered = zloss.z_loss_source(z - mu, 0.7, 2.5, "sum")
    log_z_centered = torch.logsumexp(z - mu, -1, keepdim=True)
    want = 2 * 0.3 * (mu + log_z_centered - 1.9) * p - 2 * 0.7 * (log_z_centered - 2.5) * p
    assert relative_error(raw - centered, want) < TOL


def test_removed_source_is_two_lambda_mu_p(g: torch.Generator) -> None:
    """eq:removed_source."""
    z = normal(g, T, V, scale=2) + 3
    mu = z.mean(-1, keepdim=True)
    removed = zloss.z_loss_source(z, LAMBDA, C, "sum") - zloss.z_loss_source(z - mu, LAMBDA, C, "sum")
    assert relative_error(removed, 2 * LAMBDA * mu * torch.softmax(z, -1)) < TOL


def test_projected_raw_adjoint(g: torch.Generator) -> None:
    """eq:centered_raw_adjoint: 2λ(log Z̃ − c)(p − 1/V); it is what CenteredZLoss injects, and it sums to zero."""
    hidden, weight = normal(g, T, D), normal(g, V, D) + normal(g, D)
    y = torch.randint(V, (T,), generator=g)
    z = hidden @ weight.T
    log_z_centered = torch.logsumexp(z - z.mean(-1, keepdim=True), -1, keepdim=True)
    want = 2 * LAMBDA * (log_z_centered - C) * (torch.softmax(z, -1) - 1 / V)
    for backend in ("dense", "chunked"):
        got = zloss.head_source(hidden, weight, y, zloss.CenteredZLoss(LAMBDA, C), reduction="sum", backend=backend)
        assert relative_error(got, want) < TOL
        assert got.sum(-1).abs().max() < 1e-12


def test_ce_adjoint_is_unchanged_by_the_projection(g: torch.Generator) -> None:
    """Remark on coordinates: P(p − y) = p − y."""
    z = normal(g, T, V).requires_grad_()
    y = torch.randint(V, (T,), generator=g)
    projected = nn.functional.cross_entropy(z - z.mean(-1, keepdim=True), y, reduction="sum")
    assert relative_error(grad(projected, z), grad(nn.functional.cross_entropy(z, y, reduction="sum"), z)) < TOL


def test_transport_and_its_bound(g: torch.Generator) -> None:
    """eq:transport and eq:transport_bound: ∇_θ L_Z = J_θᵀδ and ‖∇_θ L_Z‖ ≤ 2λ|log Z − c|·‖J_θ‖_op·‖p‖."""
    weight, theta = normal(g, V, D), normal(g, 5, 5)
    lift = normal(g, D, 25)

    def logits(parameter: Tensor) -> Tensor:
        return weight @ torch.tanh(lift @ parameter.reshape(-1))

    jacobian = torch.autograd.functional.jacobian(logits, theta).reshape(V, -1)
    leaf = theta.clone().requires_grad_()
    z = logits(leaf)
    gradient = grad(z_loss(z), leaf).reshape(-1)
    source = zloss.z_loss_source(z.detach(), LAMBDA, C, "sum")
    assert relative_error(gradient, jacobian.T @ source) < TOL
    p = torch.softmax(z.detach(), -1)
    bound = 2 * LAMBDA * (torch.logsumexp(z, -1) - C).abs() * torch.linalg.matrix_norm(jacobian, 2) * p.norm()
    assert gradient.norm() <= bound * (1 + 1e-12)


def test_hidden_injection_and_its_bound(g: torch.Generator) -> None:
    """eq:hidden_injection and eq:hidden_bound; ‖δ_u‖ = A_p‖δ_z‖."""
    hidden, weight = normal(g, T, D).requires_grad_(), normal(g, V, D)
    y = torch.randint(V, (T,), generator=g)
    on = zloss.head_loss(hidden, weight, y, zloss.StandardZLoss(LAMBDA, C), reduction="sum")
    off = zloss.head_loss(hidden, weight, y, zloss.CrossEntropy(), reduction="sum")
    injection = grad(on.loss, hidden) - grad(off.loss, hidden)
    source = zloss.head_source(hidden, weight, y, zloss.StandardZLoss(LAMBDA, C), reduction="sum")
    assert relative_error(injection, source @ weight) < 1e-11
    assert on.stats.gain is not None
    assert relative_error(injection.norm(dim=1), on.stats.gain * source.norm(dim=1)) < 1e-11
    bound = source.norm(dim=1) * torch.linalg.matrix_norm(weight, 2)
    assert bool((injection.norm(dim=1) <= bound * (1 + 1e-12)).all())


def test_gain_is_anisotropy_weighted(g: torch.Generator) -> None:
    """eq:ap, eq:ap_svd: a(p)² = Σ σ_j²⟨q, u_j⟩² ≤ σ_max²."""
    hidden, weight = normal(g, T, D), normal(g, V, D) + 2 * normal(g, D)
    stats = zloss.head_loss(hidden, weight, torch.zeros(T, dtype=torch.long), zloss.CrossEntropy()).stats
    left, sigma, _ = torch.linalg.svd(weight, full_matrices=False)
    p = torch.softmax(hidden @ weight.T, -1)
    q = p / p.norm(dim=1, keepdim=True)
    assert stats.gain is not None
    assert relative_error(stats.gain**2, ((q @ left) ** 2 * sigma**2).sum(1)) < TOL
    assert bool((stats.gain <= sigma.max() * (1 + TOL)).all())


def test_centering_translates_every_hidden_source_by_the_row_mean(g: torch.Generator) -> None:
    """W̃ᵀp = Wᵀp − w̄ᵀ (gradient-geometry figure, left panel)."""
    hidden, weight = normal(g, T, D), normal(g, V, D) + normal(g, D)
    p = torch.softmax(hidden @ weight.T, -1)
    centered = weight - weight.mean(0)
    assert relative_error(p @ centered, p @ weight - weight.mean(0)) < TOL
    stats = zloss.head_loss(hidden, weight, torch.zeros(T, dtype=torch.long), zloss.CrossEntropy()).stats
    assert stats.gain_centered is not None
    assert relative_error(stats.gain_centered, (p @ centered).norm(dim=1) / p.norm(dim=1)) < TOL


def test_tied_embedding_decomposition(g: torch.Generator) -> None:
    """eq:tied_decomp: the tied gradient is the sum of the gradients of untied copies."""
    table, body = normal(g, V, D), normal(g, D, D)
    ids, y = torch.randint(V, (T,), generator=g), torch.randint(V, (T,), generator=g)

    def loss(e_in: Tensor, e_out: Tensor) -> Tensor:
        out = zloss.head_loss(torch.tanh(e_in[ids] @ body), e_out, y, zloss.StandardZLoss(LAMBDA, C), reduction="sum")
        return out.loss

    tied = table.clone().requires_grad_()
    copy_in, copy_out = (table.clone().requires_grad_() for _ in range(2))
    together = grad(loss(tied, tied), tied)
    untied = torch.autograd.grad(loss(copy_in, copy_out), (copy_in, copy_out))
    assert relative_error(together, untied[0] + untied[1]) < TOL
    assert min(float(part.norm()) for part in untied) > 1e-3


def test_expansion_behind_the_factorized_objective(g: torch.Generator) -> None:
    """eq:z_expand, eq:factorized: Z-loss with c = c_μ + c_rel is the factorized objective plus its cross term."""
    z = normal(g, T, V, scale=2) + 1.5
    c_mu, c_rel = 0.4, 2.2
    mu = z.mean(-1)
    nu = torch.logsumexp(z - mu.unsqueeze(-1), -1)
    factorized = zloss.FactorizedZLoss(LAMBDA, LAMBDA, c_mu, c_rel).penalty(z, None)
    cross = 2 * LAMBDA * (mu - c_mu) * (nu - c_rel)
    assert relative_error(factorized + cross, z_loss(z, LAMBDA, c_mu + c_rel)) < TOL


def test_gain_aware_source_has_the_stop_gradient(g: torch.Generator) -> None:
    """eq:gain_aware, eq:gain_aware_source: 2λ(log Z − c)/(1 + βA²)·p, nothing from differentiating A_p."""
    hidden, weight = normal(g, T, D), normal(g, V, D)
    z = hidden @ weight.T
    p = torch.softmax(z, -1)
    gain = (p @ weight).norm(dim=1) / p.norm(dim=1)
    want = (2 * LAMBDA * (torch.logsumexp(z, -1) - C) / (1 + 0.2 * gain**2)).unsqueeze(1) * p
    y = torch.randint(V, (T,), generator=g)
    for backend in ("dense", "chunked"):
        got = zloss.head_source(
            hidden, weight, y, zloss.GainAwareZLoss(LAMBDA, 0.2, C), reduction="sum", backend=backend
        )
        assert relative_error(got, want) < TOL


def test_row_maximum_bounds_log_z(g: torch.Generator) -> None:
    """eq:precision_link: max z ≤ log Z ≤ max z + log V, and |log Z − c| ≤ r bounds the row maximum."""
    hidden, weight = normal(g, T, D, scale=4), normal(g, V, D)
    stats = zloss.head_loss(hidden, weight, torch.zeros(T, dtype=torch.long), zloss.CrossEntropy()).stats
    assert bool((stats.row_max <= stats.log_z).all())
    assert bool((stats.log_z <= stats.row_max + math.log(V) + 1e-12).all())
    r = (stats.log_z - C).abs()
    assert bool((stats.row_max >= C - r - math.log(V) - 1e-12).all())
    assert bool((stats.row_max <= C + r + 1e-12).all())


def test_storage_rounding_obeys_the_standard_model(g: torch.Generator) -> None:
    """eq:precision_link: |fl(z) − z| ≤ u_mach·|z|."""
    z = normal(g, 1000, scale=30)
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11), (torch.float32, 2.0**-24)):
        assert bool(((z.to(dtype).double() - z).abs() <= unit * z.abs() * (1 + 1e-12)).all())


def test_source_distortion_identity(g: torch.Generator) -> None:
    """eq:source_mismatch: δ̂ − δ = 2λ(ε_Z p + (log Z − c)ε_p + ε_Z ε_p)."""
    z = normal(g, T, V, scale=6)
    stored = z.bfloat16().double()
    exact, approximate = (zloss.z_loss_source(x, LAMBDA, C, "sum") for x in (z, stored))
    log_z, p = torch.logsumexp(z, -1, keepdim=True), torch.softmax(z, -1)
    epsilon_z = torch.logsumexp(stored, -1, keepdim=True) - log_z
    epsilon_p = torch.softmax(stored, -1) - p
    want = 2 * LAMBDA * (epsilon_z * p + (log_z - C) * epsilon_p + epsilon_z * epsilon_p)
    assert relative_error(approximate - exact, want) < 1e-11


def test_centered_deployment_with_bias(g: torch.Generator) -> None:
    """eq:centered_raw: μ_head = w̄u + b̄ is the mean raw logit, and subtracting it keeps the realized softmax."""
    hidden, weight, bias = normal(g, T, D), normal(g, V, D) + normal(g, D), normal(g, V)
    raw = hidden @ weight.T + bias
    deployed = zloss.centered_logits_from_raw(raw, hidden, weight, bias)
    assert relative_error(raw - deployed, raw.mean(-1, keepdim=True).expand_as(raw)) < TOL
    stats = zloss.head_loss(hidden, weight, torch.zeros(T, dtype=torch.long), zloss.CrossEntropy(), bias=bias).stats
    assert stats.mu is not None
    assert relative_error(stats.mu, raw.mean(-1)) < TOL
