"""From a chosen fit to the record of what the loss applies, with uncertainties; or to an honest "cannot be told"."""

from __future__ import annotations

import math

from zloss.audit.loss.denominator import Denominators
from zloss.audit.loss.fit import Fit
from zloss.audit.loss.model import Model
from zloss.audit.loss.probes import Space
from zloss.audit.loss.select import Selection, is_factorized
from zloss.results.loss_audit import Identified, Uncertainty

COVERAGE = 10.0
"""Standard errors in a stated uncertainty: rounding is not Gaussian, and tokens of one batch share some of it."""


def cannot_tell(
    reason: str,
    precision: str,
    space: Space,
    *,
    targets: str = "given",
    has_z: bool | None = None,
    seen: str = "unknown",
) -> Identified:
    """No figure of a fit that failed; `has_z` and `seen` where the kind of penalty is known although its numbers are not."""
    return Identified(
        has_z=has_z,
        coef=None,
        target=None,
        coordinate="other" if has_z else None,
        ce_denominator="unknown",
        z_denominator="unknown" if has_z else None,
        uncertainty=Uncertainty(),
        penalty=seen,
        vocab=space.lanes,
        ce_scale=None,
        label_smoothing=None,
        ce_weights=None,
        computes_in=precision,
        targets=targets,
        reason=reason,
    )


def describe(
    selection: Selection,
    denominators: Denominators,
    model: Model,
    precision: str,
    eps: float,
    rule: str | None,
    space: Space,
    *,
    targets: str = "given",
    ce_weights: str = "uniform",
    z_weights: str = "uniform",
) -> Identified:
    """The record of a fit that explains the gradients."""
    chosen = selection.fit
    smoothing = model.smoothing if abs(model.smoothing) > 1e-6 else 0.0
    if model.smoothing_over_others:
        smoothing *= (space.lanes - 1) / space.lanes
    # At another vocabulary the weights are those of "groups" where only a mask made them differ.
    ce_weights = "groups" if ce_weights == "uniform" and denominators.groups else ce_weights
    if not selection.has_z:
        return Identified(
            has_z=False,
            coef=None,
            target=None,
            coordinate=None,
            ce_denominator=denominators.ce,
            z_denominator=None,
            uncertainty=Uncertainty(unexplained=chosen.worst),
            vocab=space.lanes,
            ce_scale=model.ce_scale,
            label_smoothing=smoothing,
            ce_weights=ce_weights,
            computes_in=precision,
            targets=targets,
            extra=model.warp.named(),
        )
    lead = model.penalties[0]
    target, target_error = _target(chosen, lead.target, eps)
    slope = chosen.slope[0]
    relative = COVERAGE * chosen.slope_error[0] / abs(slope) + 8 * eps if slope else math.inf
    single = len(chosen.candidates) == 1 and chosen.damping is None
    words, extra = _words(chosen, model)
    shared = z_weights == "shared" or (ce_weights == "groups" and all(w.shared for w in denominators.weights))
    return Identified(
        has_z=True,
        coef=lead.coef,
        target=target,
        coordinate=lead.candidate.coordinate if single else "other",
        ce_denominator=denominators.ce,
        z_denominator=denominators.z,
        uncertainty=Uncertainty(abs(lead.coef) * relative, relative, target_error, chosen.worst),
        penalty=words,
        target_rule=rule,
        vocab=space.lanes,
        ce_scale=model.ce_scale,
        label_smoothing=smoothing,
        ce_weights=ce_weights,
        z_weights="shared" if shared else "uniform",
        computes_in=precision,
        targets=targets,
        extra={**extra, **model.warp.named()},
    )


def _target(chosen: Fit, fitted: float, eps: float) -> tuple[float | None, float | None]:
    """c and its half-width; a form of its own has its own c, or none."""
    lead, slope, offset = chosen.candidates[0], chosen.slope[0], chosen.offset[0]
    if lead.fixed:
        return lead.target, None if lead.target is None else max(1e-3, abs(lead.target) * 1e-3)
    # c = β/α; the rounding floor is that of fused kernels, which round 1 + 2λ(log Z − c) as a whole.
    spread = math.hypot(chosen.offset_error[0], (offset / slope) * chosen.slope_error[0]) / abs(slope) if slope else 0.0
    return fitted, COVERAGE * spread + 8 * eps * max(1.0, abs(fitted))


def _words(chosen: Fit, model: Model) -> tuple[str, dict[str, float]]:
    """The penalised quantity in words, and further coefficients."""
    words = " + ".join(c.words for c in chosen.candidates)
    extra = dict(chosen.candidates[0].extra)
    if is_factorized(chosen.candidates):
        shift = model.penalties[1]
        return "log Z − μ and μ, penalised apart (factorized)", {
            "shift_coef": shift.coef,
            "shift_target": shift.target,
        }
    if [c.name for c in chosen.candidates] == ["raw", "centered"]:
        second = model.penalties[1]
        return "log Z and log Z − μ (row-centered), two penalties", {
            "centered_coef": second.coef,
            "centered_target": second.target,
        }
    if chosen.damping is not None:
        return "log Z, damped by 1 + βA_p² (gain-aware)", {"beta": chosen.damping}
    return words, extra
