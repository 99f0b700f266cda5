"""A second, independent draw: what the first probes showed has to hold on it too, or it is not told.

Fresh probes of the same shape and dtype; for losses of (hidden, weight, target) a dense head of another width; and masks on
batches of a size that was never seen, where a count that is kept between calls shows. Axes: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.candidates import CENTERED, RAW
from zloss.audit.loss.decompose import decompose
from zloss.audit.loss.denominator import DENOMINATORS
from zloss.audit.loss.fit import ROUNDING
from zloss.audit.loss.identification import Identification, Second, unexplained
from zloss.audit.loss.measured import Measured, measure
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probe_calls import joined_probe, make_probes, seeded
from zloss.audit.loss.probes import Probe, allowed
from zloss.audit.loss.reference import Reference
from zloss.audit.loss.select import ROUGHLY, nearest, select

OFFSET = 101
"""Between the seeds of the two draws."""
SHARE = 1e-2
"""What may be left of the Z source (of the CE where there is no Z) on the second draw, beyond rounding."""
DENSE_TOKENS, DENSE_WIDTH = 40, 72
POWERS = {"1/√D": -0.5, "1/D": -1.0, "√D": 0.5}
"""Rules by which a factor on the logits follows the width, and their exponents."""


def confirm(box: BlackBox, ident: Identification, seed: int) -> Identification:
    """The identification with its second draw; one that cannot be told where the second draw denies it."""
    made = {name: probe for name, probe in make_probes(ident.space, seed + OFFSET).items() if name in ident.outcomes}
    try:
        outcomes = {name: box(probe.logits_TV, probe.target_T, dtype=ident.dtype) for name, probe in made.items()}
    except LossCallError as error:
        return unexplained(ident, f"The same call on a second draw of the probes fails: {error}")
    ident = replace(ident, second=Second(seed + OFFSET, made, {n: o for n, o in outcomes.items() if o.finite}))
    if not ident.told or ident.second is None:
        return ident
    if lost := sorted(made.keys() - ident.second.outcomes.keys()):
        return unexplained(
            ident, f"Loss or gradient is finite on one draw of the probes, and not on a second ({lost[0]})."
        )
    reason = _denied(box, ident)
    if reason is None and box.linear and ident.plain:
        ident, reason = _dense_head(box, ident, seed)
    whole = ident.trusted and not ident.coarse and ident.selection.how in ("none", "explained", "moderate_only")
    if reason is None and whole and ident.identified.ce_weights != "groups":
        ident, reason = _fresh_mask(box, ident, seed)
    return ident if reason is None else unexplained(ident, reason)


def _denied(box: BlackBox, ident: Identification) -> str | None:
    """In one sentence with its figure, how the second draw differs from what the first one showed."""
    assert ident.second is not None
    parts = [(ident.second.probes[name], outcome.grad_TV) for name, outcome in ident.second.outcomes.items()]
    how = ident.selection.how
    if ident.trusted and how in ("none", "explained", "moderate_only"):
        share = _left(ident, [part for part in parts if how != "moderate_only" or part[0].name != "wide"])
    elif how == "filtered":
        again = select(measure(parts, ident.eps, ident.model.warp))
        names = [[c.name for c in one.fit.candidates] for one in (again, ident.selection)]
        share = 0.0 if again.how == how and names[0] == names[1] else 1.0
    elif how == "rounded":
        share = worst if (worst := nearest(measure(parts, ident.eps)).worst) > ROUGHLY else 0.0
    elif how in ("none", "explained") and ident.model.warp.identity:
        share = _left_of_source(box, ident)
    else:
        return None
    if share <= SHARE:
        return None
    has_z = ident.identified.has_z
    by, of = (f"a penalty on {ident.identified.penalty}", "its source") if has_z else ("cross-entropy", "the gradient")
    return f"One draw of the probes is explained by {by}, but on a second draw {share:.2g} of {of} is left over."


def _left(ident: Identification, parts: list[tuple[Probe, Tensor]]) -> float:
    """The largest share, over groups of probes, that the model leaves of its own Z source (or CE) beyond rounding."""
    unit = ident.eps if ident.model.warp.identity else max(ident.eps, 1e-7)
    worst = 0.0
    for probe, grad_TV in parts:
        r = probe.reference
        ce_TV, z_TV = ident.model.ce_source(r), ident.model.z_source(r)
        scale_T = abs(ident.model.ce_scale) / ident.model.count(ident.model.ce_denominator, r) + z_TV.norm(dim=-1)
        rounding_T = ROUNDING * unit * probe.noise_T * scale_T
        for rows in (probe.saturated_T, ~probe.saturated_T):
            left = float((grad_TV - ce_TV - z_TV)[rows].norm()) if bool(rows.any()) else 0.0
            whole = float((z_TV if ident.identified.has_z else ce_TV)[rows].norm())
            if left > float(rounding_T[rows].norm()) and whole > 0:
                worst = max(worst, left / whole)
    return worst


def _left_of_source(box: BlackBox, ident: Identification) -> float:
    """The same where token weights are not known beforehand: of the source beside each token's own CE."""
    assert ident.second is not None
    apart = [probes.apart(ident.second.probes[name], box.avoid) for name in ident.second.outcomes]
    answers = [box(probe.logits_TV, probe.target_T, dtype=ident.dtype) for probe in apart]
    if not all(answer.finite for answer in answers):
        return 1.0
    data = measure([(probe, answer.grad_TV) for probe, answer in zip(apart, answers, strict=True)], ident.eps)
    rows, fit = decompose(data), ident.selection.fit
    if not rows.exact:
        return 1.0
    shape = fit.candidates[0].shape if fit.candidates else RAW.shape
    if len(fit.candidates) > 1 or shape not in (RAW.shape, CENTERED.shape) or any(c.coupled for c in fit.candidates):
        return 0.0
    centered = shape is CENTERED.shape
    w_T = rows.b_T if centered else rows.b_T + rows.u_T
    s_T = rows.u_T if centered else rows.a_T - rows.b_T - rows.u_T
    wanted_T = torch.zeros_like(s_T)
    if fit.candidates:
        wanted_T = fit.slope[0] * fit.candidates[0].value(data.reference) - fit.offset[0]
        if ident.identified.z_weights == "shared":
            wanted_T = wanted_T * w_T / _mean_weight(ident.data)
    beyond_T = ((s_T - wanted_T).abs() - 4 * rows.tolerance_T).clamp(min=0)
    whole = max(float(wanted_T[rows.solved_T].norm()), float(w_T[rows.solved_T].norm()) * 1e-6, 1e-300)
    return float(beyond_T[rows.solved_T].norm()) / whole


def _mean_weight(data: Measured) -> float:
    """The mean weight on CE in the first draw, to which shared weights were related."""
    rows = decompose(data)
    return float((rows.b_T + rows.u_T)[rows.solved_T].mean())


def _dense_head(box: BlackBox, ident: Identification, seed: int) -> tuple[Identification, str | None]:
    """A dense hidden and another width: is it hidden @ weightᵀ that enters, and does a factor follow the width?"""
    lanes, width = ident.space.lanes, ident.space.width
    wide = DENSE_WIDTH + 16 * (width == DENSE_WIDTH)
    hidden, weight, target = dense_head(DENSE_TOKENS, wide, ident, seed + OFFSET)
    try:
        _, _, grad_weight = box.on_head(hidden, weight, target, dtype=ident.dtype)
    except LossCallError as error:
        return ident, f"A dense hidden state of {wide} columns fails: {error}"
    r = Reference(hidden @ weight.T, target, lanes)
    limit = max(1e-5, 1e3 * ident.eps)

    def error_with(power: float) -> float:
        model = replace(ident, scale_power=power).model_at(wide)
        wanted = (model.ce_source(r) + model.z_source(r)).T @ hidden
        return float((grad_weight - wanted).norm() / wanted.norm().clamp(min=1e-300))

    deviation = error_with(0.0)
    if deviation <= limit:
        return ident, None
    for power in POWERS.values():
        if error_with(power) <= limit:
            return replace(ident, scale_power=power), None
    return ident, (
        f"On dense hidden states (T = {DENSE_TOKENS}, D = {wide}) the gradient at the weight is off by {deviation:.2g} from what "
        "one-hot hidden states show: the loss changes hidden or weight before their product."
    )


def dense_head(tokens: int, wide: int, ident: Identification, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [T, D], weight [V, D], target [T]) in fp64; hidden rows differ in length, logits have a spread of 2.5."""
    generator, space = seeded(seed), ident.space
    lengths = torch.linspace(0.5, 2.0, tokens, dtype=torch.float64).unsqueeze(-1)
    hidden = lengths * torch.randn(tokens, wide, generator=generator, dtype=torch.float64)
    weight = 2.5 / wide**0.5 * torch.randn(space.width, wide, generator=generator, dtype=torch.float64)
    if space.padded:
        hidden[:, 0] = 1.0
        weight[space.lanes :] = 0.0
        weight[space.lanes :, 0] = probes.PADDING
    target = allowed(torch.randint(space.lanes, (tokens,), generator=generator), space.lanes, space.avoid)
    return hidden, weight, target


def _fresh_mask(box: BlackBox, ident: Identification, seed: int) -> tuple[Identification, str | None]:
    """A masked batch of a size that was never seen, then the same size without a mask.

    A loss that keeps a count divides the second batch by the count of the first.
    """
    named = (ident.denominators.ce, ident.denominators.z)
    if not ident.denominators.masks_accepted or not ident.denominators.named:
        return ident, None
    assert ident.second is not None
    tokens = 3 * ident.space.tokens // 4
    pool = joined_probe([ident.second.probes[name] for name in ident.second.outcomes if name != "wide"])
    generator = seeded(seed + OFFSET)
    probe = pool.take(torch.randperm(len(pool.target_T), generator=generator)[:tokens])
    keep = torch.rand(tokens, generator=generator) < 0.4
    keep[:2] = True
    seen: list[tuple[float, float]] = []
    for one in (probe.masked(keep), probe):
        try:
            outcome = box(one.logits_TV, one.target_T, dtype=ident.dtype)
        except LossCallError:
            return ident, None
        if not outcome.finite:
            return ident, None
        seen.append(factors(ident, one, outcome.grad_TV))
    off = [max(abs(f - 1) for f in pair) > SHARE for pair in seen]
    if not any(off):
        return ident, None
    valid, counts = int(keep.sum()), DENOMINATORS[named[0] if named[0] in DENOMINATORS else named[1] or "sum"]
    shown = [counts(valid, tokens) / (seen[0][0] or math.inf), counts(tokens, tokens) / (seen[1][0] or math.inf)]
    if off[1] and math.isclose(shown[0], shown[1], rel_tol=1e-3):
        kept = (
            f"A first batch of {tokens} tokens with {valid} valid ones is divided by {shown[0]:.4g}, and so is the next batch "
            f"of this shape, with {tokens} valid: the loss keeps a count for each shape."
        )
        return replace(ident, kept_state=kept), kept
    return ident, (
        f"The denominators of the first batches ({named[0]!r} for CE) do not hold on a second draw: with {valid} of {tokens} "
        f"tokens valid the weights are {seen[0][0]:.4g} (CE) and {seen[0][1]:.4g} (Z) times the expected ones."
    )


def factors(ident: Identification, probe: Probe, grad_TV: Tensor) -> tuple[float, float]:
    """The factors on CE and on Z that make the model fit this batch; 1 for a part that is not there."""
    r = probe.reference
    keep_T = r.valid_T
    parts = [ident.model.ce_source(r), ident.model.z_source(r)]
    inverse = (1 / probe.noise_T[keep_T]).unsqueeze(-1)
    columns = [(part[keep_T] * inverse).flatten() for part in parts]
    loud = [i for i, column in enumerate(columns) if float(column.norm()) > 0]
    stacked = torch.stack([columns[i] / columns[i].norm() for i in loud], dim=-1)
    goal = (grad_TV[keep_T] * inverse).flatten().unsqueeze(-1)
    x = torch.linalg.lstsq(stacked, goal).solution.flatten()
    found = {i: float(x[k] / columns[i].norm()) for k, i in enumerate(loud)}
    return found.get(0, 1.0), found.get(1, 1.0)


def targets_unused(box: BlackBox, ident: Identification) -> bool:
    """Whether other targets, and ignored ones, leave value and gradient as they were: a function of the logits alone."""
    probe, first = ident.probes["mixed"], ident.outcomes["mixed"]
    keep = torch.arange(len(probe.target_T)) % 3 == 0
    for other in (probes.apart(probe, box.avoid), probe.masked(keep)):
        try:
            outcome = box(other.logits_TV, other.target_T, dtype=ident.dtype)
        except LossCallError:
            return False
        if outcome.value != first.value or not torch.equal(outcome.grad_TV, first.grad_TV):
            return False
    return True
