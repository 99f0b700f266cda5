"""Identification: from the gradients of a few probe batches to λ, c, coordinate and denominators, with uncertainty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.confirm import confirm, targets_unused
from zloss.audit.loss.decompose import decompose
from zloss.audit.loss.denominator import Denominators, find_denominators
from zloss.audit.loss.describe import cannot_tell, describe
from zloss.audit.loss.explanation import explain_gradients
from zloss.audit.loss.fit import ROUNDING
from zloss.audit.loss.identification import Identification, WeighedOn
from zloss.audit.loss.ignored_class import SpecialClass, without_special
from zloss.audit.loss.measured import Measured, batch, measure
from zloss.audit.loss.model import Model
from zloss.audit.loss.model_of_fit import at_second_vocabulary, build_model, unit_sources
from zloss.audit.loss.moved_targets import Moved, find_moved
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT, accepted_dtype, computes_in
from zloss.audit.loss.probe_calls import call_all, joined_probe, make_probes, seeded
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.select import COARSE, Selection
from zloss.audit.loss.warp import Warp
from zloss.audit.loss.weights import Weighted

OTHER_ON_CALM_LOGITS = (
    "On calm logits the loss applies another gradient than on large ones: a part of it is switched or clipped by the size of "
    "the loss or by the batch."
)


def identify(box: BlackBox, space: Space, seed: int, progress: Callable[[], None] = lambda: None) -> Identification:
    """Probe one loss, name what it applies, and confirm that on a second draw.

    `box` is left as the loss wants to be called: `targets`, `added` and `avoid` are set on it.
    """
    space, special = without_special(box, space)
    progress()
    found = _with_special(_first_draw(box, space, seed, progress), special)
    if found.told and found.identified.ce_denominator == "none":
        found = replace(found, targets_unused=targets_unused(box, found))
    return confirm(box, found, seed)


def _with_special(ident: Identification, special: tuple[SpecialClass, ...]) -> Identification:
    """State the weights of classes that the probes left out, where all other tokens have one weight."""
    got = ident.identified
    if not special or not ident.told or got.ce_weights != "uniform":
        return ident
    shared = "shared" if got.has_z and all(one.shares for one in special) else got.z_weights
    weights = "class" if any(abs(one.ce - 1) >= 1e-3 for one in special) else got.ce_weights
    return replace(ident, special=special, identified=replace(got, ce_weights=weights, z_weights=shared))


def _first_draw(box: BlackBox, space: Space, seed: int, progress: Callable[[], None]) -> Identification:
    """The loss as it stands, then with targets moved, then with its logits warped."""
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
    best = explain_gradients(box, space, seed, made, outcomes, dtype, eps, warps=warps)
    data, selection, weighted = best.data, best.selection, best.weighted
    reason = unrepeatable = _unrepeatable(box, made, outcomes, dtype, eps, seed)
    if reason is None and selection.how == "unexplained":
        reason = _reason(weighted, data, box.linear)
    if reason is not None:
        seen = None if weighted is None else weighted.seen
        known = None if weighted is None or weighted.selection is not None or seen is None else weighted.has_z
        told = cannot_tell(reason, precision, space, targets=box.targets, has_z=known, seen=seen or "unknown")
        nothing = Denominators("unknown", None, 1.0, None, (), True)
        empty = Model((), "unknown", None, 1.0, 0.0, probe_vocab=space.lanes)
        bare = Selection("unexplained", selection.fit)
        return Identification(
            space, dtype, eps, made, outcomes, data, bare, nothing, empty, told, kept_state=unrepeatable
        )
    chosen = selection.fit
    weighed = WeighedOn(joined_probe(best.weighed_on), best.rounding)
    denominators = _denominators(box, weighed, selection, data.warp, dtype, space.tokens, seed)
    model = replace(build_model(chosen, selection, denominators, space), warp=data.warp)
    followed = selection.how in ("explained", "none") and eps < COARSE and weighted is None
    rule, model = at_second_vocabulary(box, space, seed, dtype, eps, model, chosen) if followed else (None, model)
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
    found = Identification(
        space, dtype, eps, made, outcomes, data, selection, denominators, model, identified, weighed_on=weighed
    )
    if _other_on_calm_logits(box, found, seed):
        told = cannot_tell(OTHER_ON_CALM_LOGITS, precision, space, targets=box.targets)
        return replace(found, identified=told, selection=Selection("unexplained", chosen))
    return found


def denominators_again(box: BlackBox, ident: Identification, seed: int) -> Denominators:
    """The denominators from other batches of the same tokens."""
    if ident.weighed_on is None:
        return ident.denominators
    warp, tokens = ident.model.warp, ident.space.tokens
    return _denominators(box, ident.weighed_on, ident.selection, warp, ident.dtype, tokens, seed)


def _denominators(
    box: BlackBox, on: WeighedOn, selection: Selection, warp: Warp, dtype: torch.dtype, tokens: int, seed: int
) -> Denominators:
    return find_denominators(
        box,
        on.rows,
        lambda probe: unit_sources(selection.fit, probe.reference, warp),
        has_z=selection.has_z,
        dtype=dtype,
        eps=on.rounding,
        seed=seed,
        nonzero_only=selection.how == "filtered",
        tokens=tokens,
    )


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


def _reason(weighted: Weighted | None, data: Measured, linear: bool) -> str:
    """Why nothing can be told, in one sentence, by what was seen."""
    if weighted is not None and weighted.seen is not None:
        return f"The gradient holds {weighted.seen}."
    one = batch(data, 0)
    rows = decompose(one)
    share = 1 - float(rows.inside_T.double().mean())
    if share == 0:
        return "The gradient of each token is along p, onehot(y) and 1/V, but no known objective gives these amounts."
    changed = "hidden states, weight, logits or targets" if linear else "logits or targets"
    return (
        "The gradient of a token is not made of p, onehot(y) and 1/V alone, as those of cross-entropy and of penalties on "
        f"log Z are: the loss changes its {changed} in a way the audit does not know, or adds another term."
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
        change, limit = difference(outcomes[name], outcome), max(1e-6, 8 * eps)
        if change <= limit:
            continue
        # Only chance brings the first answer back under the first seed.
        first = option is not None and box(made[name].logits_TV, made[name].target_T, dtype=dtype)
        if first and difference(outcomes[name], first) <= limit:
            return f"The same inputs give another gradient {words} (relative change {change:.3g}): the loss draws random numbers."
        return f"The same inputs give another gradient when called again (relative change {change:.3g}): the loss keeps state."
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
