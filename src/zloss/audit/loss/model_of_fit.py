"""From a chosen fit to the objective as a function: penalties with λ and c, label smoothing, denominators.

A second vocabulary shows how c and label smoothing follow V.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.candidates import CENTERED
from zloss.audit.loss.denominator import Denominators, token_count
from zloss.audit.loss.describe import COVERAGE
from zloss.audit.loss.fit import Fit, fit
from zloss.audit.loss.measured import measure
from zloss.audit.loss.model import Model, Penalty
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probe_calls import make_probes
from zloss.audit.loss.probes import Space
from zloss.audit.loss.reference import Reference
from zloss.audit.loss.select import Selection
from zloss.audit.loss.warp import NO_WARP, Warp

SECOND_VOCAB = 1000


def unit_sources(chosen: Fit, given: Reference, warp: Warp = NO_WARP) -> tuple[Tensor, Tensor]:
    """CE source at weight 1, and the Z source at λ = w = 1 of the first penalty (others in proportion)."""
    r = warp.reference(given)
    ce = r.p_TV - r.onehot_TV + chosen.smoothing * (r.onehot_TV - r.uniform_TV)
    z = torch.zeros_like(ce)
    lead = chosen.slope[0] if chosen.slope and chosen.slope[0] else 1.0
    for candidate, slope, offset in zip(chosen.candidates, chosen.slope, chosen.offset, strict=True):
        amplitude = chosen.candidates[0].factor * (slope * candidate.value(r) - offset) / lead
        if chosen.damping is not None:
            amplitude = amplitude / (1 + chosen.damping * r.gain_squared_T)
        z = z + amplitude.unsqueeze(-1) * candidate.shape(r)
    return warp.transport(given, ce), warp.transport(given, z)


def build_model(chosen: Fit, selection: Selection, denominators: Denominators, space: Space) -> Model:
    tokens = space.tokens
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
        coef = slope * z_count / candidate.factor
        penalties.append(Penalty(candidate, coef, offset / slope if slope else 0.0, chosen.damping))
    return Model(tuple(penalties), denominators.ce, denominators.z, ce_scale, smoothing, probe_vocab=space.lanes)


def at_second_vocabulary(
    box: BlackBox, space: Space, seed: int, dtype: torch.dtype, eps: float, model: Model, chosen: Fit
) -> tuple[str | None, Model]:
    """How c and label smoothing follow the vocabulary, from a second one; None where the loss wants its own.

    c: "constant", "log_v" for log V plus a constant, or "other". Smoothing: ε/V or, as t5x has it, ε/(V − 1).
    """
    if space.padded or space.lanes >= SECOND_VOCAB:
        return None, model
    other = replace(space, lanes=SECOND_VOCAB, width=SECOND_VOCAB)
    made = make_probes(other, seed)
    try:
        outcomes = {name: box(probe.logits_TV, probe.target_T, dtype=dtype) for name, probe in made.items()}
    except LossCallError:
        return None, model
    parts = [(made[name], outcome.grad_TV) for name, outcome in outcomes.items() if outcome.finite]
    if not parts:
        return None, model
    gain = torch.cat([probe.reference.gain_squared_T for probe, _ in parts]) if chosen.damping is not None else None
    smoothed = chosen.smoothing != 0.0
    again = fit(measure(parts, eps, model.warp), chosen.candidates, smoothing=smoothed, gain_squared_T=gain)
    if smoothed and chosen.smoothing:
        per_other = again.smoothing / chosen.smoothing
        t5x = (SECOND_VOCAB / (SECOND_VOCAB - 1)) / (space.lanes / (space.lanes - 1))
        model = replace(model, smoothing_over_others=abs(per_other / t5x - 1) < 1e-6 < abs(per_other - 1))
    if not chosen.candidates or chosen.candidates[0].fixed or not again.slope or not again.slope[0] or not again.good:
        return None, model
    moved = again.offset[0] / again.slope[0] - chosen.offset[0] / chosen.slope[0]
    expected = math.log(SECOND_VOCAB / space.lanes)
    near = max(1e-3, 4 * COVERAGE * (again.offset_error[0] + chosen.offset_error[0]) / abs(chosen.slope[0]))
    near = min(near, 0.1 * expected)
    if abs(moved - expected) < near:
        return "log_v", replace(model, log_v_target=True)
    return ("constant" if abs(moved) < near else "other"), model
