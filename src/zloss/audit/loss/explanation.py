"""The penalty that explains the measured gradients: on the logits as given, or else as the loss may have changed them.

Where no known penalty on the given logits explains them, these are tried in turn: 16-bit rounding of a known penalty, clamped
logits, a weight of its own on each token, scaled or capped logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.candidates import CENTERED, MAX_SHIFTED, RAW
from zloss.audit.loss.clamp import find_clamp
from zloss.audit.loss.fit import Fit
from zloss.audit.loss.measured import Measured, measure
from zloss.audit.loss.model_of_fit import unit_sources
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.probe_calls import crowded_probe, seeded
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.select import COARSE, ROUGHLY, Selection, misfit, nearest, select
from zloss.audit.loss.warp import find_warps
from zloss.audit.loss.weights import Weighted, depends_on_target, find_weighted

WARP_ACCURACY = 1e-8


@dataclass(frozen=True)
class Explanation:
    """The penalty that explains the gradients best, and how it was found."""

    data: Measured
    selection: Selection
    rounding: float
    """Unit roundoff to which the penalty can be weighed, batch by batch."""
    weighed_on: list[Probe]
    """Probes from which the denominators are read."""
    weighted: Weighted | None = None
    """What token weights explain; None where none were needed."""


def explain_gradients(
    box: BlackBox,
    space: Space,
    seed: int,
    made: dict[str, Probe],
    outcomes: dict[str, Outcome],
    dtype: torch.dtype,
    eps: float,
    *,
    warps: bool,
) -> Explanation:
    """From a known penalty on the logits as given to the other explanations; `warps` also tries scaled and capped logits."""
    parts = [(made[name], outcome.grad_TV) for name, outcome in outcomes.items()]
    data = measure(parts, eps)
    gain = torch.cat([made[name].reference.gain_squared_T for name in outcomes]) if box.linear else None
    selection = select(data, gain_squared_T=gain)
    faint: list[Probe] = []
    if selection.how == "none" and eps < COARSE and (heard := crowded_probe(box, space, seed, dtype)) is not None:
        # A faint penalty on log Z − max: common shifts do not amplify it.
        more = [*parts, (heard[0], heard[1].grad_TV)]
        again = select(measure(more, eps))
        if again.how == "explained" and again.fit.candidates[0].name in MAX_SHIFTED:
            parts, data, selection = more, measure(more, eps), again
            faint = [heard[0]]
    # A faint penalty cannot be weighed to the rounding of the loss, batch by batch.
    rounding = UNIT["bfloat16"] if faint else eps
    if selection.how == "unexplained" and (rough := _rounded_penalty(box, data, space, seed, dtype)) is not None:
        selection, rounding = Selection("rounded", rough), UNIT["bfloat16"]
    weighted: Weighted | None = None
    used = [made[name] for name in outcomes if selection.how != "moderate_only" or name != "wide"]
    if selection.how in ("unexplained", "filtered"):
        data, selection = _clamped_logits(box, space, dtype, parts, eps) or (data, selection)
    if selection.how in ("unexplained", "moderate_only", "filtered"):
        weighted, alone = _token_weights(box, outcomes, made, dtype, eps)
        if weighted is not None and weighted.selection is not None:
            data, selection, used = weighted.data, weighted.selection, alone
        elif selection.how != "unexplained":
            weighted = None
    if selection.how in ("unexplained", "filtered") and weighted is None and warps:
        data, selection = _warped_logits(made, outcomes, parts, eps) or (data, selection)
    return Explanation(data, selection, rounding, faint or used, weighted)


def _token_weights(
    box: BlackBox, outcomes: dict[str, Outcome], made: dict[str, Probe], dtype: torch.dtype, eps: float
) -> tuple[Weighted | None, list[Probe]]:
    """The same logits with targets that are never the most likely class, solved token by token."""
    alone = [probes.apart(made[name], box.avoid) for name in outcomes]
    answers = [box(probe.logits_TV, probe.target_T, dtype=dtype) for probe in alone]
    if not all(answer.finite for answer in answers):
        return None, alone
    data = measure([(probe, answer.grad_TV) for probe, answer in zip(alone, answers, strict=True)], eps)
    found = find_weighted(data)
    if found is None or found.selection is None or found.has_z is False:
        return found, alone
    unlikely, likely = probes.apart(made["mixed"], box.avoid), probes.likely(made["mixed"], box.avoid)
    both = [(probe, box(probe.logits_TV, probe.target_T, dtype=dtype)) for probe in (unlikely, likely)]
    if all(answer.finite for _, answer in both):
        first, second = (measure([(probe, answer.grad_TV)], eps) for probe, answer in both)
        if depends_on_target(first, second, found):
            seen = "a source along p that depends on the target, as no penalty on log Z does"
            return replace(found, selection=None, seen=seen, has_z=None), alone
    return found, alone


def _clamped_logits(
    box: BlackBox, space: Space, dtype: torch.dtype, parts: list[tuple[Probe, Tensor]], eps: float
) -> tuple[Measured, Selection] | None:
    """The penalty on clamped logits that explains everything, if there is one."""
    clamp = find_clamp(box, space, dtype)
    if clamp is None:
        return None
    clamped = measure(parts, eps, clamp)
    again = select(clamped)
    return (clamped, again) if again.how in ("explained", "none") else None


def _warped_logits(
    made: dict[str, Probe],
    outcomes: dict[str, Outcome],
    parts: list[tuple[Probe, Tensor]],
    eps: float,
) -> tuple[Measured, Selection] | None:
    """The penalty on scaled or capped logits that explains everything, if there is one."""
    rows = (~made["mixed"].saturated_T).nonzero().flatten()[:20]
    ordinary = [(made["mixed"].take(rows), outcomes["mixed"].grad_TV[rows])]
    for warp in find_warps(lambda warp: misfit(measure(ordinary, eps, warp))):
        # The search is no finer than this, whatever the arithmetic of the loss.
        warped = measure(parts, max(eps, WARP_ACCURACY), warp)
        again = select(warped)
        right = again.how == "explained" and again.fit.candidates[0] in (RAW, CENTERED)
        if right or again.how == "none":
            return warped, again
    return None


def _rounded_penalty(box: BlackBox, data: Measured, space: Space, seed: int, dtype: torch.dtype) -> Fit | None:
    """The nearest right penalty if it leaves little, and what it leaves is noise.

    A wrong formula leaves nearly the same residual after a small common shift; rounding leaves an unrelated one.
    """
    rough = nearest(data)
    if rough.worst > ROUGHLY:
        return None
    base = probes.continuous(seeded(seed), **space.sizes())
    residuals = []
    for shift in (0.0, 0.37):
        probe = base.shifted(shift)
        outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
        if not outcome.finite:
            return None
        ce, z = unit_sources(rough, probe.reference)
        left = outcome.grad_TV - rough.ce_weight * ce - rough.slope[0] / 2 * z
        residuals.append(left)
    a, b = residuals
    alike = float((a * b).sum()) / max(float(a.norm()) * float(b.norm()), 1e-300)
    return rough if alike < 0.5 else None
