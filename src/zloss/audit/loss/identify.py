"""Identification: from the gradients of a few probe batches to λ, c, coordinate and denominators, with uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox, Outcome
from zloss.audit.loss.candidates import CENTERED, MAX_SHIFTED, RAW
from zloss.audit.loss.denominator import Denominators, find_denominators, token_count
from zloss.audit.loss.fit import Fit, Measured, fit, measure
from zloss.audit.loss.model import Model, Penalty
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT, accepted_dtype, computes_in
from zloss.audit.loss.probes import Probe
from zloss.audit.loss.reference import Reference
from zloss.audit.loss.select import Selection, is_factorized, misfit, nearest, select
from zloss.audit.loss.warp import NO_WARP, Warp, find_warps
from zloss.results.loss_audit import Identified, Uncertainty

COVERAGE = 10.0
"""Standard errors in a stated uncertainty: rounding is not Gaussian, and tokens of one batch share some of it."""
SECOND_VOCAB = 1000
COARSE = 2.0**-20
"""Unit roundoff above which small differences of the loss mean nothing."""
WARP_ACCURACY = 1e-8
ROUGHLY = 0.3
"""The share of the non-CE gradient that low precision may leave unexplained."""


@dataclass(frozen=True)
class Space:
    """The vocabulary the probes live in: `lanes` inside log Z, `width` columns in all."""

    lanes: int
    width: int


@dataclass(frozen=True)
class Identification:
    """Everything the findings need: the probes, what came back, the chosen penalty, and the model built from it."""

    space: Space
    dtype: torch.dtype
    eps: float
    probes: dict[str, Probe]
    outcomes: dict[str, Outcome]
    """Only finite ones; a probe missing here gave NaN or Inf."""
    data: Measured
    selection: Selection
    denominators: Denominators
    model: Model
    identified: Identified

    @property
    def trusted(self) -> bool:
        """Whether the model predicts gradients on new logits."""
        return self.selection.how in ("none", "explained", "filtered", "moderate_only")


def identify(box: BlackBox, space: Space, seed: int) -> Identification:
    """Probe one loss and name what it applies."""
    made = _make_probes(space, seed)
    dtype = accepted_dtype(box, made["mixed"])
    outcomes = _call_all(box, made, dtype)
    precision = computes_in(box, probes.continuous(_generator(seed), **_sizes(space)), dtype)
    eps = UNIT[precision]
    parts = [(made[name], outcome.grad_TV) for name, outcome in outcomes.items()]
    data = measure(parts, eps)
    gain = torch.cat([made[name].reference.gain_squared_T for name in outcomes]) if box.linear else None
    selection = select(data, gain_squared_T=gain)
    faint: list[Probe] = []
    if selection.how == "none" and eps < COARSE and (heard := _crowded(box, space, seed, dtype)) is not None:
        # A faint penalty on log Z − max: common shifts do not amplify it.
        more = [*parts, (heard[0], heard[1].grad_TV)]
        again = select(measure(more, eps))
        if again.how == "explained" and again.fit.candidates[0].name in MAX_SHIFTED:
            parts, data, selection = more, measure(more, eps), again
            faint = [heard[0]]
    # A faint penalty cannot be weighed to the rounding of the loss, batch by batch.
    shown = UNIT["bfloat16"] if faint else eps
    if selection.how == "unexplained" and (rough := _rounded(box, data, space, seed, dtype)) is not None:
        selection, shown = Selection("rounded", rough), UNIT["bfloat16"]
    if selection.how == "unexplained":
        rows = ~made["mixed"].saturated_T
        ordinary = [(made["mixed"].take(rows), outcomes["mixed"].grad_TV[rows])]
        for warp in find_warps(lambda warp: misfit(measure(ordinary, eps, warp))):
            # The search is no finer than this, whatever the arithmetic of the loss.
            warped = measure(parts, max(eps, WARP_ACCURACY), warp)
            again = select(warped)
            right = again.how == "explained" and again.fit.candidates[0] in (RAW, CENTERED)
            if right or again.how == "none":
                data, selection = warped, again
                break
    chosen = selection.fit
    used = [made[name] for name in outcomes if selection.how != "moderate_only" or name != "wide"]
    denominators = find_denominators(
        box,
        _join(faint or used),
        lambda probe: _unit_sources(chosen, probe.reference, data.warp),
        has_z=selection.has_z,
        dtype=dtype,
        eps=shown,
        seed=seed,
        nonzero_only=selection.how == "filtered",
    )
    model = replace(_build_model(chosen, selection, denominators, space), warp=data.warp)
    followed = selection.how == "explained" and eps < COARSE
    rule = _target_rule(box, space, seed, dtype, eps, model, chosen) if followed else None
    model = replace(model, log_v_target=rule == "log_v")
    identified = _describe(chosen, selection, denominators, model, precision, eps, rule, space)
    return Identification(space, dtype, eps, made, outcomes, data, selection, denominators, model, identified)


def _make_probes(space: Space, seed: int) -> dict[str, Probe]:
    generator, sizes = _generator(seed), _sizes(space)
    return {
        "mixed": probes.mixed(generator, **sizes),
        "saturated": probes.saturated(generator, wide=False, **sizes),
        "wide": probes.saturated(generator, wide=True, **sizes),
    }


def _call_all(box: BlackBox, made: dict[str, Probe], dtype: torch.dtype) -> dict[str, Outcome]:
    outcomes = {name: box(probe.logits_TV, probe.target_T, dtype=dtype) for name, probe in made.items()}
    ordinary = outcomes["mixed"]
    if not ordinary.finite:
        where = "loss" if not math.isfinite(ordinary.value) else "gradient"
        raise LossCallError(
            f"{box.name} gave a non-finite {where} on ordinary finite logits with valid targets: "
            "there is nothing to identify. Check it on `torch.randn(64, 96)` first."
        )
    if not ordinary.has_gradient:
        raise LossCallError(
            f"{box.name} returned a loss without a gradient (`requires_grad` is False): it cannot train anything. "
            "Return the loss before `.detach()`, and do not call it under `torch.no_grad()`."
        )
    return {name: outcome for name, outcome in outcomes.items() if outcome.finite}


def _crowded(box: BlackBox, space: Space, seed: int, dtype: torch.dtype) -> tuple[Probe, Outcome] | None:
    probe = probes.crowded(_generator(seed), **_sizes(space))
    outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
    return (probe, outcome) if outcome.finite else None


def _unit_sources(chosen: Fit, given: Reference, warp: Warp = NO_WARP) -> tuple[Tensor, Tensor]:
    """CE source at weight 1, and the Z source at λ = w = 1 of the first penalty (others in proportion)."""
    r = warp.reference(given)
    ce = r.p_TV - r.onehot_TV + chosen.smoothing * (r.onehot_TV - r.uniform_TV)
    z = torch.zeros_like(ce)
    lead = chosen.slope[0] if chosen.slope and chosen.slope[0] else 1.0
    for candidate, slope, offset in zip(chosen.candidates, chosen.slope, chosen.offset, strict=True):
        amplitude = 2 * (slope * candidate.value(r) - offset) / lead
        if chosen.damping is not None:
            amplitude = amplitude / (1 + chosen.damping * r.gain_squared_T)
        z = z + amplitude.unsqueeze(-1) * candidate.shape(r)
    return warp.transport(given, ce), warp.transport(given, z)


def _build_model(chosen: Fit, selection: Selection, denominators: Denominators, space: Space) -> Model:
    tokens = probes.TOKENS
    ce_count = token_count(denominators.ce, tokens, tokens)
    ce_scale = 0.0 if denominators.ce == "none" else chosen.ce_weight * ce_count
    smoothing = chosen.smoothing
    # Centered: a weight below 1 on onehot(y) is label smoothing, and its 1/V part must not be read as c.
    if selection.has_z and CENTERED in chosen.candidates and denominators.ce != "sum" and 0.5 < ce_scale < 1 - 1e-3:
        smoothing, ce_scale = 1 - ce_scale, 1.0
    if not selection.has_z:
        return Model((), denominators.ce, None, ce_scale, smoothing, probe_vocab=space.lanes)
    z_count = token_count(denominators.z or "sum", tokens, tokens)
    penalties = []
    for candidate, slope, offset in zip(chosen.candidates, chosen.slope, chosen.offset, strict=True):
        if candidate is CENTERED and smoothing and not chosen.smoothing:
            offset = offset + ce_scale * smoothing / ce_count
        penalties.append(Penalty(candidate, slope * z_count / 2, offset / slope if slope else 0.0, chosen.damping))
    return Model(tuple(penalties), denominators.ce, denominators.z, ce_scale, smoothing, probe_vocab=space.lanes)


def _describe(
    chosen: Fit,
    selection: Selection,
    denominators: Denominators,
    model: Model,
    precision: str,
    eps: float,
    rule: str | None,
    space: Space,
) -> Identified:
    smoothing = model.smoothing if abs(model.smoothing) > 1e-6 else 0.0
    if not selection.has_z:
        return Identified(
            has_z=False,
            coef=None,
            target=None,
            coordinate=None if selection.how == "none" else "other",
            ce_denominator=denominators.ce,
            z_denominator=None,
            uncertainty=Uncertainty(unexplained=chosen.worst),
            penalty="none" if selection.how == "none" else "a gradient that is neither CE nor a known penalty",
            vocab=space.lanes,
            ce_scale=model.ce_scale,
            label_smoothing=smoothing,
            computes_in=precision,
            extra=model.warp.named(),
        )
    lead = model.penalties[0]
    slope, offset = chosen.slope[0], chosen.offset[0]
    relative = COVERAGE * chosen.slope_error[0] / abs(slope) + 8 * eps if slope else math.inf
    # c = β/α; the rounding floor is that of fused kernels, which round 1 + 2λ(log Z − c) as a whole.
    spread = math.hypot(chosen.offset_error[0], (offset / slope) * chosen.slope_error[0]) / abs(slope) if slope else 0.0
    target_error = COVERAGE * spread + 8 * eps * max(1.0, abs(lead.target))
    factorized = is_factorized(chosen.candidates)
    legible = selection.how != "unexplained" or chosen.worst < 0.5
    explained = selection.how in ("explained", "filtered", "moderate_only", "rounded")
    single = len(chosen.candidates) == 1 and chosen.damping is None
    extra: dict[str, float] = {}
    words = " + ".join(c.words for c in chosen.candidates)
    if factorized:
        shift = model.penalties[1]
        words = "log Z − μ and μ, penalised apart (factorized)"
        extra = {"shift_coef": shift.coef, "shift_target": shift.target}
    if chosen.damping is not None:
        words, extra = "log Z, damped by 1 + βA_p² (gain-aware)", {"beta": chosen.damping}
    return Identified(
        has_z=True,
        coef=lead.coef if legible else None,
        target=lead.target if legible else None,
        coordinate=lead.candidate.coordinate if explained and single else "other",
        ce_denominator=denominators.ce,
        z_denominator=denominators.z,
        uncertainty=Uncertainty(abs(lead.coef) * relative, relative, target_error, chosen.worst)
        if legible
        else Uncertainty(unexplained=chosen.worst),
        penalty=words if explained else f"not a known penalty; nearest: {words}",
        target_rule=rule,
        vocab=space.lanes,
        ce_scale=model.ce_scale,
        label_smoothing=smoothing,
        computes_in=precision,
        extra={**extra, **model.warp.named()},
    )


def _target_rule(
    box: BlackBox, space: Space, seed: int, dtype: torch.dtype, eps: float, model: Model, chosen: Fit
) -> str | None:
    """Whether c stays or follows log V when the vocabulary grows; None where the loss wants a fixed vocabulary."""
    if space.lanes != space.width:
        return None
    other = Space(SECOND_VOCAB, SECOND_VOCAB)
    made = _make_probes(other, seed)
    try:
        outcomes = {name: box(probe.logits_TV, probe.target_T, dtype=dtype) for name, probe in made.items()}
    except LossCallError:
        return None
    parts = [(made[name], outcome.grad_TV) for name, outcome in outcomes.items() if outcome.finite]
    if not parts:
        return None
    gain = torch.cat([probe.reference.gain_squared_T for probe, _ in parts]) if chosen.damping is not None else None
    again = fit(
        measure(parts, eps, model.warp), chosen.candidates, smoothing=chosen.smoothing != 0.0, gain_squared_T=gain
    )
    if not again.slope or not again.slope[0]:
        return None
    lead = model.penalties[0]
    moved = again.offset[0] / again.slope[0] - chosen.offset[0] / chosen.slope[0]
    expected = math.log(SECOND_VOCAB / space.lanes)
    if abs(lead.target - math.log(space.lanes)) < 0.05 and abs(moved - expected) < 0.1 * expected:
        return "log_v"
    return "constant" if abs(moved) < 0.1 * expected else "other"


def _rounded(box: BlackBox, data: Measured, space: Space, seed: int, dtype: torch.dtype) -> Fit | None:
    """The nearest right penalty if it leaves little, and what it leaves is noise.

    A wrong formula leaves nearly the same residual after a small common shift; rounding leaves an unrelated one.
    """
    rough = nearest(data)
    if rough.worst > ROUGHLY:
        return None
    base = probes.continuous(_generator(seed), **_sizes(space))
    residuals = []
    for shift in (0.0, 0.37):
        probe = base.shifted(shift)
        outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
        if not outcome.finite:
            return None
        ce, z = _unit_sources(rough, probe.reference)
        left = outcome.grad_TV - rough.ce_weight * ce - rough.slope[0] / 2 * z
        residuals.append(left)
    a, b = residuals
    alike = float((a * b).sum()) / max(float(a.norm()) * float(b.norm()), 1e-300)
    return rough if alike < 0.5 else None


def _join(parts: list[Probe]) -> Probe:
    r = [probe.reference for probe in parts]
    joined = Reference(torch.cat([x.logits_TV for x in r]), torch.cat([x.target_T for x in r]), r[0].lanes)
    return Probe("joined", joined, torch.cat([probe.saturated_T for probe in parts]))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sizes(space: Space) -> dict[str, int]:
    return {"lanes": space.lanes, "width": space.width}
