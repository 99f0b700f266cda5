"""Least squares in fp64: how much of the measured logit gradients a penalty explains, and with which coefficients.

    δ_t  =  w ω_t [(p_t − y_t) + ε (y_t − 1/V)]  +  Σ_k ζ_t (α_k v_kt − β_k) ∂v_kt/∂z  +  residual

ω_t and ζ_t are 1, or token weights that were measured before.

Rows are weighted by the rounding they can have suffered, so that noise-free tokens decide. Groups of probes are also
judged one by one: a penalty must explain all of them, not only the loudest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.candidates import Candidate
from zloss.audit.loss.measured import Measured
from zloss.audit.loss.reference import Reference

EXPLAINED = 1e-3
"""A group counts as explained when at most this share of its non-CE gradient is left over (or only rounding is)."""
ROUNDING = 30.0
"""Rounding errors allowed, in units of eps times the known amplification of a token."""


@dataclass(frozen=True)
class Fit:
    """One penalty (or a sum of them) against the measured gradients."""

    candidates: tuple[Candidate, ...]
    ce_weight: float
    smoothing: float
    """ε of label smoothing."""
    slope: tuple[float, ...]
    """α_k = 2λ_k w of every candidate."""
    offset: tuple[float, ...]
    """β_k = 2λ_k w c_k."""
    slope_error: tuple[float, ...]
    offset_error: tuple[float, ...]
    chi: float
    """Weighted residual per token in units of eps: compares penalties with each other."""
    unexplained: dict[str, float]
    """Per group ‖residual‖ / ‖gradient − CE part‖; 0 where only rounding is left."""
    residual_TV: Tensor
    auxiliary_TV: Tensor
    """The fitted non-CE part."""
    damping: float | None = None
    """β of a gain-aware denominator."""

    @property
    def good(self) -> bool:
        return self.worst <= EXPLAINED

    @property
    def worst(self) -> float:
        return max(self.unexplained.values(), default=0.0)


def fit(
    data: Measured,
    candidates: tuple[Candidate, ...] = (),
    *,
    smoothing: bool = False,
    gain_squared_T: Tensor | None = None,
    nonzero_only: bool = False,
    refine: bool = False,
) -> Fit:
    """Weighted least squares for the given penalties; `nonzero_only` leaves out entries whose gradient is exactly 0.

    `refine` also learns, per kind of token, how much of the CE weight's rounding really shows: a loss that adds two
    gradients rounds less than a fused kernel. It sharpens the coefficients but makes `chi` incomparable between fits.

    `gain_squared_T` adds the gain-aware denominator: a_t (1 + βA_t²) = 2λ(v_t − c) is linear in β.
    """
    r = data.reference
    keep = (data.grad_TV != 0).to(data.grad_TV.dtype) if nonzero_only else None
    values = [_value(c, data) for c in candidates]
    omega, zeta = data.omega_T.unsqueeze(-1), data.zeta_T.unsqueeze(-1)
    shapes = [zeta * data.transport(c.shape(r)) for c in candidates]
    columns = [omega * data.transport(r.p_TV - r.onehot_TV)]
    if smoothing:
        columns.append(omega * data.transport(r.onehot_TV - r.uniform_TV))
    slope_at: list[int] = []
    offset_at: list[int | None] = []
    for candidate, v_T, shape_TV in zip(candidates, values, shapes, strict=True):
        slope_at.append(len(columns))
        offset_at.append(None if candidate.fixed else len(columns) + 1)
        columns += [v_T.unsqueeze(-1) * shape_TV] if candidate.fixed else [v_T.unsqueeze(-1) * shape_TV, -shape_TV]
    weight, amplitude = 1.0, torch.zeros_like(data.noise_T)
    damped = None if gain_squared_T is None else gain_squared_T * _along_p(data)
    x, errors, chi = [0.0] * len(columns), [0.0] * len(columns), 0.0
    shown_T = torch.ones_like(data.noise_T)
    for _ in range(6 if refine else 3):
        extra = [] if damped is None else [-damped.unsqueeze(-1) * shapes[0]]
        sigma_T = data.noise_T * (weight * shown_T * data.omega_T.abs() + amplitude).clamp(min=1e-30)
        x, errors, chi, left = _least_squares([*columns, *extra], data.grad_TV, sigma_T, keep)
        if refine:
            shown_T = _shown_rounding(data, left, weight)
        weight = max(abs(x[0]), 1e-30)
        parts = [x[i] * v - (0.0 if j is None else x[j]) for i, j, v in zip(slope_at, offset_at, values, strict=True)]
        if damped is not None and gain_squared_T is not None:
            parts[0] = parts[0] / (1 + x[-1] * gain_squared_T).clamp(min=1e-6)
        amplitude = sum((part.abs() for part in parts), torch.zeros_like(data.noise_T))
    auxiliary = sum((p.unsqueeze(-1) * s for p, s in zip(parts, shapes, strict=True)), torch.zeros_like(data.grad_TV))
    model = x[0] * columns[0] + auxiliary
    if smoothing:
        model = model + x[1] * columns[1]
    residual = data.grad_TV - model
    if keep is not None:
        residual = residual * keep
    # Large columns that cancel do not make the residual beside them small: what a CE alone leaves is the measure.
    (alone,), _, _, _ = _least_squares(columns[:1], data.grad_TV, data.noise_T, keep)
    beside = data.grad_TV - alone * columns[0]
    unexplained = _judge(data, residual, auxiliary + residual, beside, weight, amplitude)
    return Fit(
        candidates=candidates,
        ce_weight=x[0],
        smoothing=x[1] / x[0] if smoothing and x[0] else 0.0,
        slope=tuple(x[i] for i in slope_at),
        offset=tuple(0.0 if j is None else x[j] for j in offset_at),
        slope_error=tuple(errors[i] for i in slope_at),
        offset_error=tuple(0.0 if j is None else errors[j] for j in offset_at),
        chi=chi / (data.eps * weight),
        unexplained=unexplained,
        residual_TV=residual,
        auxiliary_TV=auxiliary,
        damping=x[-1] if gain_squared_T is not None else None,
    )


def _along_p(data: Measured) -> Tensor:
    """The measured amplitude a_t of a source a_t·p_t beside w(p_t − y_t), token by token."""
    r = data.reference
    p, y, g = r.p_TV, r.onehot_TV, data.grad_TV
    pp, py, yy = (p * p).sum(-1), (p * y).sum(-1), (y * y).sum(-1)
    gp, gy = (g * p).sum(-1), (g * y).sum(-1)
    determinant = pp * yy - py * py
    total = (gp * yy - gy * py) / determinant.clamp(min=1e-12)
    weight = (gp * py - gy * pp) / determinant.clamp(min=1e-12)
    # Where p is onehot(y), CE is silent and the gradient is the source.
    return torch.where(determinant < 1e-9, gp / pp, total - weight)


def _value(candidate: Candidate, data: Measured) -> Tensor:
    if not candidate.coupled:
        return candidate.value(data.reference)
    out = torch.zeros_like(data.noise_T)
    r = data.reference
    for i in sorted(set(data.batch_T.tolist())):
        rows = data.batch_T == i
        out[rows] = candidate.value(Reference(r.logits_TV[rows], r.target_T[rows], r.lanes))
    return out


def _least_squares(
    columns: list[Tensor], y_TV: Tensor, sigma_T: Tensor, keep: Tensor | None
) -> tuple[list[float], list[float], float, Tensor]:
    """Coefficients, their standard errors, the weighted residual norm per token, and the unweighted residual norms.

    One degree of freedom per token, not per entry: the entries of a row share their rounding.
    """
    inverse = (1.0 / sigma_T).unsqueeze(-1)
    masked = inverse if keep is None else inverse * keep
    weighted = torch.stack([(column * masked).flatten() for column in columns])
    goal = (y_TV * masked).flatten()
    scale = weighted.norm(dim=-1).clamp(min=1e-300)
    unit = weighted / scale.unsqueeze(-1)
    inverse_gram = torch.linalg.pinv(unit @ unit.T, hermitian=True, rcond=1e-13)
    solution = inverse_gram @ (unit @ goal)
    # One refinement step: the normal equations square the condition number.
    solution = solution + inverse_gram @ (unit @ (goal - solution @ unit))
    left = (goal - solution @ unit).view_as(y_TV)
    freedom = max(len(sigma_T) - len(columns), 1)
    variance = float((left**2).sum()) / freedom
    spread = (variance * inverse_gram.diagonal().clamp(min=0)).sqrt()
    x = (solution / scale).tolist()
    errors = (spread / scale).tolist()
    return x, errors, variance**0.5, left.norm(dim=-1) * sigma_T


def _shown_rounding(data: Measured, left_T: Tensor, weight: float) -> Tensor:
    """Per kind of token, the observed residual over the rounding a fused kernel would show; between 1e-4 and 1.

    Kinds: saturated on its target (CE contributes exactly 0), saturated elsewhere, ordinary.
    """
    r = data.reference
    saturated = data.noise_T == 1
    on_target = saturated & (r.cross_entropy_T == 0)
    shown = torch.ones_like(left_T)
    for kind in (on_target, saturated & ~on_target, ~saturated):
        if bool(kind.any()):
            ratio = float((left_T[kind] / data.noise_T[kind]).square().mean().sqrt()) / (data.eps * weight)
            shown[kind] = min(max(ratio, 1e-4), 1.0)
    return shown


def _judge(
    data: Measured, residual: Tensor, auxiliary: Tensor, beside: Tensor, weight: float, amplitude: Tensor
) -> dict[str, float]:
    unexplained = {}
    rounding_T = ROUNDING * data.eps * data.noise_T * (weight + amplitude)
    for name, rows in data.groups.items():
        left = float(residual[rows].norm())
        whole = min(float(auxiliary[rows].norm()), float(beside[rows].norm()))
        noise = float(rounding_T[rows].norm())
        if data.eps < 2.0**-20:
            # Where two fitted columns nearly cancel, their size says nothing: at most 1 % of the gradient is rounding.
            noise = min(noise, 1e-2 * float(data.grad_TV[rows].norm()))
        unexplained[name] = left / whole if left > noise and whole > 0 else 0.0
    return unexplained
