"""Identification: from the gradients of a few probe batches to λ, c, coordinate and denominators, with uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox, Outcome
from zloss.audit.loss.candidates import CENTERED, MAX_SHIFTED, RAW
from zloss.audit.loss.clamp import find_clamp
from zloss.audit.loss.decompose import decompose
from zloss.audit.loss.denominator import Denominators, find_denominators, token_count
from zloss.audit.loss.describe import COVERAGE, cannot_tell, describe
from zloss.audit.loss.fit import ROUNDING, Fit, Measured, batch, fit, measure
from zloss.audit.loss.ignored_class import without_ignored
from zloss.audit.loss.model import Model, Penalty
from zloss.audit.loss.moved_targets import Moved, find_moved
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT, accepted_dtype, computes_in
from zloss.audit.loss.probe_calls import call_all, crowded_probe, joined_probe, make_probes, seeded
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.reference import Reference
from zloss.audit.loss.select import COARSE, Selection, misfit, nearest, select
from zloss.audit.loss.warp import NO_WARP, Warp, find_warps
from zloss.audit.loss.weights import Weighted, depends_on_target, find_weighted
from zloss.results.loss_audit import Identified

SECOND_VOCAB = 1000
WARP_ACCURACY = 1e-8
ROUGHLY = 0.3
"""The share of the non-CE gradient that low precision may leave unexplained."""


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
    def told(self) -> bool:
        """Whether it could be told what the loss applies."""
        return self.identified.has_z is not None and self.identified.reason is None

    @property
    def trusted(self) -> bool:
        """Whether the model predicts gradients on new logits: token weights and corners of other forms are not known there."""
        known = self.selection.how in ("none", "explained", "filtered", "moderate_only")
        form = any(c.name == "form" for c in self.selection.fit.candidates)
        return self.told and known and not form and self.identified.ce_weights in ("uniform", "groups")

    @property
    def coarse(self) -> bool:
        return self.eps > COARSE


def identify(box: BlackBox, space: Space, seed: int, progress: Callable[[], None] = lambda: None) -> Identification:
    """Probe one loss and name what it applies: as it stands, then with targets moved, then with its logits warped.

    `box` is left as the loss wants to be called: `targets`, `added` and `avoid` are set on it.
    """
    space = without_ignored(box, space)
    progress()
    first = _identify(box, space, seed, warps=False)
    progress()
    if first.told and first.selection.how != "filtered":
        return _with_added(box, space, seed, first) if first.selection.how == "none" else first
    if first.identified.reason is not None and first.identified.has_z is None and not first.told:
        moved = _moved(box, first)
        if moved is not None:
            box.targets = moved
            again = _identify(box, space, seed, warps=False)
            progress()
            if again.told:
                return _with_added(box, space, seed, again) if again.selection.how == "none" else again
            box.targets = "given"
    if first.identified.has_z is not None and first.selection.how != "filtered":
        return first
    warped = _identify(box, space, seed, warps=True)
    progress()
    return warped


def _identify(box: BlackBox, space: Space, seed: int, *, warps: bool) -> Identification:
    made = make_probes(space, seed)
    dtype = accepted_dtype(box, made["mixed"])
    outcomes = call_all(box, made, dtype)
    precision = computes_in(box, probes.continuous(seeded(seed), **space.sizes()), dtype)
    eps = UNIT[precision]
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
    shown = UNIT["bfloat16"] if faint else eps
    if selection.how == "unexplained" and (rough := _rounded(box, data, space, seed, dtype)) is not None:
        selection, shown = Selection("rounded", rough), UNIT["bfloat16"]
    weighted: Weighted | None = None
    used = [made[name] for name in outcomes if selection.how != "moderate_only" or name != "wide"]
    if selection.how in ("unexplained", "filtered"):
        data, selection = _clamped(box, space, dtype, parts, eps) or (data, selection)
    if selection.how in ("unexplained", "moderate_only", "filtered"):
        weighted, alone = _token_by_token(box, outcomes, made, dtype, eps)
        if weighted is not None and weighted.selection is not None:
            data, selection, used = weighted.data, weighted.selection, alone
        elif selection.how != "unexplained":
            weighted = None
    if selection.how in ("unexplained", "filtered") and weighted is None and warps:
        data, selection = _warped(made, outcomes, parts, eps) or (data, selection)
    reason = _unrepeatable(box, made, outcomes, dtype, eps, seed)
    if reason is None and selection.how == "unexplained":
        reason = _reason(box, weighted, data)
    if reason is not None:
        seen = None if weighted is None else weighted.seen
        known = None if weighted is None or weighted.selection is not None or seen is None else weighted.has_z
        told = cannot_tell(reason, precision, space, targets=box.targets, has_z=known, seen=seen or "unknown")
        nothing = Denominators("unknown", None, 1.0, None, (), True)
        empty = Model((), "unknown", None, 1.0, 0.0, probe_vocab=space.lanes)
        bare = Selection("unexplained", selection.fit)
        return Identification(space, dtype, eps, made, outcomes, data, bare, nothing, empty, told)
    chosen = selection.fit
    denominators = find_denominators(
        box,
        joined_probe(faint or used),
        lambda probe: _unit_sources(chosen, probe.reference, data.warp),
        has_z=selection.has_z,
        dtype=dtype,
        eps=shown,
        seed=seed,
        nonzero_only=selection.how == "filtered",
        tokens=space.tokens,
    )
    model = replace(_build_model(chosen, selection, denominators, space), warp=data.warp)
    followed = selection.how in ("explained", "none") and eps < COARSE and weighted is None
    rule, model = _vocabulary(box, space, seed, dtype, eps, model, chosen) if followed else (None, model)
    identified = describe(
        selection,
        denominators,
        model,
        precision,
        eps,
        rule,
        space,
        targets=box.targets,
        ce_weights="uniform" if weighted is None else weighted.ce_weights,
        z_weights="uniform" if weighted is None else weighted.z_weights or "uniform",
    )
    found = Identification(space, dtype, eps, made, outcomes, data, selection, denominators, model, identified)
    if _other_on_calm_logits(box, found, seed):
        reason = (
            "On calm logits the loss applies another gradient than on large ones: a part of it is switched or clipped by "
            "the size of the loss or by the batch."
        )
        told = cannot_tell(reason, precision, space, targets=box.targets)
        return replace(found, identified=told, selection=Selection("unexplained", chosen))
    return found


def _other_on_calm_logits(box: BlackBox, ident: Identification, seed: int) -> bool:
    """Whether batches of calm logits, whose losses are small, follow another objective than the one identified.

    Low precision deviates there too, but not in the same way after a small common shift.
    """
    if not ident.trusted or ident.coarse or ident.selection.how not in ("none", "explained"):
        return False
    base = probes.continuous(seeded(seed), **ident.space.sizes())
    small = base.with_logits(_calmed(base))
    for probe in (base, small):
        left = []
        for shift in (0.0, 0.37):
            moved = probe.shifted(shift)
            outcome = box(moved.logits_TV, moved.target_T, dtype=ident.dtype)
            if not outcome.finite:
                return False
            left.append(
                outcome.grad_TV - ident.model.ce_source(moved.reference) - ident.model.z_source(moved.reference)
            )
        z = float(ident.model.z_source(probe.reference).norm())
        ce = float(ident.model.ce_source(probe.reference).norm())
        a, b = left
        size = min(float(a.norm()), float(b.norm()))
        rounding = ROUNDING * ident.eps * float(probe.noise_T.max()) * (ce + z)
        if size > max(rounding, 1e-2 * z, 1e-5 * ce) and float((a * b).sum()) > 0.5 * float(a.norm()) * float(b.norm()):
            return True
    return False


def _calmed(probe: Probe) -> Tensor:
    """The logits of a model at its start: mean 0 and a small spread; padding stays."""
    r = probe.reference
    inside = 0.5 * (r.inside_TV - r.mu_T.unsqueeze(-1)) / r.inside_TV.std(-1, keepdim=True)
    return torch.cat([inside, r.logits_TV[:, r.lanes :]], dim=-1)


def _token_by_token(
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


def _clamped(
    box: BlackBox, space: Space, dtype: torch.dtype, parts: list[tuple[Probe, Tensor]], eps: float
) -> tuple[Measured, Selection] | None:
    """The penalty on clamped logits that explains everything, if there is one."""
    clamp = find_clamp(box, space, dtype)
    if clamp is None:
        return None
    clamped = measure(parts, eps, clamp)
    again = select(clamped)
    return (clamped, again) if again.how in ("explained", "none") else None


def _warped(
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


def _reason(box: BlackBox, weighted: Weighted | None, data: Measured) -> str:
    """Why nothing can be told, in one sentence, by what was seen."""
    if weighted is not None and weighted.seen is not None:
        return f"The gradient holds {weighted.seen}."
    one = batch(data, 0)
    rows = decompose(one)
    share = 1 - float(rows.inside_T.double().mean())
    if share == 0:
        return "The gradient of each token is along p, onehot(y) and 1/V, but no known objective gives these amounts."
    return (
        "The gradient of a token is not made of p, onehot(y) and 1/V alone, as those of cross-entropy and of penalties on "
        "log Z are: the loss changes its logits or targets in a way the audit does not know, or adds another term."
    )


def _moved(box: BlackBox, ident: Identification) -> Moved | None:
    """Whether the targets of other rows are used; asked on rows whose targets are never the most likely class."""
    probe = probes.apart(ident.probes["mixed"], box.avoid)
    outcome = box(probe.logits_TV, probe.target_T, dtype=ident.dtype)
    if box.targets != "given" or not outcome.finite:
        return None
    return find_moved(measure([(probe, outcome.grad_TV)], ident.eps))


def _unrepeatable(
    box: BlackBox,
    made: dict[str, Probe],
    outcomes: dict[str, Outcome],
    dtype: torch.dtype,
    eps: float,
    seed: int,
) -> str | None:
    """A sentence where the same inputs give another answer, at once or under another random seed."""
    name = "wide" if "wide" in outcomes else "mixed"
    for words, option in (("again", None), ("under another random seed", seed + 12345)):
        try:
            outcome = box(made[name].logits_TV, made[name].target_T, dtype=dtype, seed=option)
        except LossCallError:
            return f"The same call fails when it is made {words}."
        if not difference(outcomes[name], outcome) <= max(1e-6, 8 * eps):
            what = "keeps state" if option is None else "draws random numbers"
            return f"The same inputs give another gradient {words}: the loss {what}."
    return None


def difference(a: Outcome, b: Outcome) -> float:
    """Relative change of gradient or value between two calls."""
    grad = float((a.grad_TV - b.grad_TV).norm()) / max(float(a.grad_TV.norm()), 1e-300)
    return max(grad, abs(a.value - b.value) / max(abs(a.value), 1e-12))


def _with_added(box: BlackBox, space: Space, seed: int, plain: Identification) -> Identification:
    """Where the loss is CE alone and a Z with a gradient is returned beside it: what the caller's sum applies."""
    for item in plain.outcomes["mixed"].reported:
        if not item.requires_grad or item.value is None:
            continue
        box.added = item.name
        try:
            both = _identify(box, space, seed, warps=False)
        except LossCallError:
            both = None
        scale = plain.identified.ce_scale
        same = both is not None and scale and abs((both.identified.ce_scale or 0.0) / scale - 1) < 1e-3
        if both is not None and same and both.told and both.identified.has_z:
            return both
        box.added = None
    return plain


def _unit_sources(chosen: Fit, given: Reference, warp: Warp = NO_WARP) -> tuple[Tensor, Tensor]:
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


def _build_model(chosen: Fit, selection: Selection, denominators: Denominators, space: Space) -> Model:
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


def _vocabulary(
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


def _rounded(box: BlackBox, data: Measured, space: Space, seed: int, dtype: torch.dtype) -> Fit | None:
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
        ce, z = _unit_sources(rough, probe.reference)
        left = outcome.grad_TV - rough.ce_weight * ce - rough.slope[0] / 2 * z
        residuals.append(left)
    a, b = residuals
    alike = float((a * b).sum()) / max(float(a.norm()) * float(b.norm()), 1e-300)
    return rough if alike < 0.5 else None
