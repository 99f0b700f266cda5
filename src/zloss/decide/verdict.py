"""The verdict on a compared method: accepted, rejected or inconclusive, from its three parts.

The paper: an intervention is accepted only when the diagnosed coordinate improves and validation quality remains
acceptable, judged together with the optimizer-facing endpoints. `method_verdict` evaluates the runs of a method.
`evaluated_comparison` completes a comparison that was read from a file: one from before the parts were kept, or one that
is read under other thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from zloss.decide.intervals import BlockValues, block_values, paired_interval, violations
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict_parts import (
    RUN_AGAIN,
    Pairs,
    all_must_hold,
    judge_effect,
    judge_optimizer,
    judge_quality,
    judge_ratio,
    quality_part,
)
from zloss.errors import InputError
from zloss.results.audit import HeadNumbers
from zloss.results.comparison import ComparedMethod, Comparison, State, Verdict, VerdictName, VerdictPart, VerdictParts
from zloss.results.options import Coordinate
from zloss.results.run_config import MU_CENTERING, MU_LOSS, OFF
from zloss.results.run_metrics import (
    DELTA_U,
    DELTA_U_GAIN_AWARE,
    SHIFT,
    SHIFT_SQUARED,
    VIOLATION,
    VIOLATION_SQUARED,
    RunMetrics,
)

DIAGNOSED = "p_z_999"
"""Quantity of `delta_diagnosed` unless another one is requested."""
CE, STANDARD, FACTORIZED, GAIN_AWARE, CENTERED_HEAD = "ce", "standard", "factorized", "gain-aware", "centered-head"
LOWER_THE_SHIFT = (CENTERED_HEAD, MU_LOSS, MU_CENTERING)
"""Methods that have to lower |μ|."""
OUTCOMES: dict[State, tuple[VerdictName, bool | None]] = {
    "holds": ("accepted", True),
    "fails": ("rejected", False),
    "open": ("inconclusive", None),
}
"""State of the deciding parts → the verdict, and whether the method is accepted."""


def method_verdict(
    comparison: Comparison,
    method: ComparedMethod,
    pairs: Pairs,
    *,
    standard: Sequence[RunMetrics] = (),
    diagnosed: str | None = None,
    target: float | None = None,
    thresholds: Thresholds | None = None,
) -> Verdict:
    """The verdict on one method of a comparison, which states a tolerance, from `pairs` of its runs and the baseline's.

    `standard`: the runs of Standard at the method's λ. `diagnosed` replaces what the method is meant to lower.
    `target`: c of the runs; None is log V.
    """
    if not pairs or method.paired is None:
        reason = "no run of this method shares a seed with the baseline"
        return Verdict(method.method, method.coef, delta_ppl=None, accepted=None, reason=reason, reasons=())
    limits, side, key = thresholds or Thresholds(), pairs[0][1].coordinate, diagnosed or DIAGNOSED
    known = [entry.name for entry in fields(HeadNumbers)]
    if key not in known:
        raise InputError(f"unknown diagnosed quantity {key!r} of a head: expected one of {', '.join(known)}.")
    ppl, tail = method.paired.deployed.get("ppl"), method.paired.same_coordinate.of(side).get(key)
    if target is not None and key == DIAGNOSED:
        tail = None  # it is measured from c = log V
    tolerance = comparison.quality.tolerance_ppl
    assert tolerance is not None  # see `with_tolerance`
    if comparison.router is not None:
        coordinate = _router_scale(comparison, method, limits)
    else:
        coordinate = coordinate_part(method.method, method.coef, pairs, standard, diagnosed, target=target)
    parts = VerdictParts(
        coordinate=coordinate,
        quality=quality_part(pairs, tolerance),
        optimizer=judge_optimizer(comparison, method, limits),
    )
    verdict = Verdict(
        method=method.method,
        coef=method.coef,
        delta_ppl=None if ppl is None else ppl.mean,
        delta_ppl_std=None if ppl is None else ppl.std,
        within_tolerance=None if ppl is None else ppl.mean <= tolerance,
        coordinate=side,
        delta_diagnosed=None if tail is None else tail.mean,
        improves=None if tail is None else tail.mean < 0,
        accepted=None,
        reason=f"{'no penalty' if comparison.router is None else 'no router loss'}, so there is nothing to accept; "
        "its parts are listed only for comparison",
    )
    return with_parts(verdict, parts)


def with_parts(verdict: Verdict, parts: VerdictParts) -> Verdict:
    """`verdict` with its parts and what follows from them: any part that fails rejects, and all three must hold to accept.

    The reasons come from the parts that decided. A method without anything to lower has parts, but no verdict.
    """
    if parts.coordinate is None:
        return replace(verdict, accepted=None, reasons=(), parts=parts)
    named = parts.named()
    states = [part.state for _, part in named]
    deciding: State = "fails" if "fails" in states else "holds" if states == ["holds"] * 3 else "open"
    name, accepted = OUTCOMES[deciding]
    reasons = tuple(f"{key}: {part.reason}" for key, part in named if part.state == deciding)
    return replace(verdict, accepted=accepted, reason=" ".join(reasons), verdict=name, reasons=reasons, parts=parts)


Quantity = tuple[str, str, str, float | None]
"""A token quantity that a method has to lower: its name in sentences, the key of the method's values among the tails or means
of `ValidationBlocks`, that of its reference's values, and the quantile that is meant (None for a mean)."""
STATED = {
    "p_z_999": ("|log Z − c|", VIOLATION, 0.999),
    "mu_abs_99": ("|μ|", SHIFT, 0.99),
    "delta_u_99": ("‖δ_u‖", DELTA_U, 0.99),
    "delta_u_99_gain_aware": ("‖δ_u‖, gain-aware", DELTA_U_GAIN_AWARE, 0.99),
    "diag_z": ("(log Z − c)²", VIOLATION_SQUARED, None),
    "mu_rms": ("μ²", SHIFT_SQUARED, None),
}
"""Keys of a head's numbers that can be tested instead of a method's own quantity: name, quantity, quantile."""


def diagnosed_quantities(method: str, coordinate: Coordinate, baseline: Coordinate) -> tuple[Quantity, ...]:
    """What `method`, which deploys `coordinate`, has to lower; `baseline` is what the baseline deploys.

    Gain-aware is compared with Standard at the same λ, the others with the baseline. CE has nothing to lower; a method
    registered under another name (`zloss.register_objective`) is treated like Standard.
    """
    violation, squared = f"{VIOLATION}.{coordinate}", f"{VIOLATION_SQUARED}.centered"
    tail = ("|log Z − c|" if coordinate == "raw" else "|log Z̃ − c|", violation, violation, 0.999)
    methods: dict[str, tuple[Quantity, ...]] = {
        CE: (),
        **dict.fromkeys(LOWER_THE_SHIFT, (("|μ|", f"{SHIFT}.{coordinate}", f"{SHIFT}.{baseline}", 0.99),)),
        FACTORIZED: (
            ("μ²", f"{SHIFT_SQUARED}.raw", f"{SHIFT_SQUARED}.raw", None),
            ("(log Z̃ − c)²", squared, squared, None),
        ),
        GAIN_AWARE: (("‖δ_u‖ against Standard", f"{DELTA_U_GAIN_AWARE}.raw", f"{DELTA_U}.raw", 0.99),),
    }
    return methods.get(method, (tail,))


def coordinate_part(
    method: str,
    coef: float,
    pairs: Pairs,
    standard: Sequence[RunMetrics] = (),
    diagnosed: str | None = None,
    *,
    target: float | None = None,
) -> VerdictPart | None:
    """Does the method lower the quantity that it is meant to lower? None for a method without one.

    `standard`: the runs of Standard at the method's λ. `diagnosed` replaces the method's own quantity.
    """
    baseline, run = pairs[0]
    if diagnosed is not None:
        if diagnosed not in STATED:
            return VerdictPart("open", f"{diagnosed} is not recorded per block, so its spread over text is unknown.")
        name, stem, quantile = STATED[diagnosed]
        key = f"{stem}.{'raw' if stem == SHIFT_SQUARED else run.coordinate}"
        if target is not None and stem in (VIOLATION_SQUARED, DELTA_U, DELTA_U_GAIN_AWARE):
            name += " at c = log V"
        return _quantity_part((name, key, key, quantile), pairs, target)
    quantities = diagnosed_quantities(method, run.coordinate, baseline.coordinate)
    if target is not None and method in (FACTORIZED, GAIN_AWARE):
        why = "its quantity is validated only for c = log V, the default"
        return VerdictPart("open", f"{method} with a target of {target:g} cannot be evaluated: {why}.")
    if not quantities:
        return None
    if method != GAIN_AWARE:
        return all_must_hold([_quantity_part(quantity, pairs, target) for quantity in quantities])
    references = {run.seed: run for run in standard}
    against = [(references[run.seed], run) for _, run in pairs if run.seed in references]
    if not against:
        return VerdictPart("open", f"no run of standard at λ {coef:g} is available for comparison; run it as well.")
    return all_must_hold([*(_quantity_part(quantity, against) for quantity in quantities), _gradient_norm(against)])


def _quantity_part(quantity: Quantity, pairs: Pairs, target: float | None = None) -> VerdictPart:
    name, method_key, reference_key, quantile = quantity
    stem, _, coordinate = method_key.partition(".")
    at_target = target if stem == VIOLATION else None
    if at_target is not None:
        name = f"{name} at c = {at_target:g}"

    def values(run: RunMetrics, key: str) -> BlockValues | None:
        if at_target is None:
            return block_values(run.validation_blocks, key, tail=quantile is not None)
        return violations(run.validation_blocks, coordinate, at_target)

    complete = []
    for reference, run in pairs:
        before, after = values(reference, reference_key), values(run, method_key)
        if before is not None and after is not None and before.tokens_B == after.tokens_B:
            complete.append((before, after))
    part = judge_effect(name, complete if len(complete) == len(pairs) else [], quantile)
    return part if at_target is None else replace(part, numbers={**part.numbers, "target": at_target})


def _gradient_norm(pairs: Pairs) -> VerdictPart:
    """p99 ‖g‖₂ over steps against Standard's, seed by seed; it has no spread over text."""
    name = "p99 ‖g‖₂ against Standard"
    norms = [(base.training.grad_norm_p99, run.training.grad_norm_p99) for base, run in pairs]
    logs = [math.log(run / base) for base, run in norms if base and run]
    if len(logs) < len(norms):
        return VerdictPart("open", f"{name} is zero or not finite on some seed.")
    return judge_ratio(name, paired_interval(logs, 0.0, 0), {"quantity": name})


def _router_scale(comparison: Comparison, method: ComparedMethod, thresholds: Thresholds) -> VerdictPart | None:
    """Holds if |s_rel − 1| ≤ tolerance; if it fails, the λ_R that would give s_rel = 1 is stated.

    s_rel of a variant is the same on every seed; None for the variant without a router loss.
    """
    if method.method.split(" + ")[0] == OFF or comparison.router is None:
        return None
    variants = [v for v in comparison.router.conventions if (v.convention, v.coef) == (method.method, method.coef)]
    s_rel, tolerance = variants[0].s_rel if variants else None, thresholds.router_scale_tolerance
    if s_rel is None:
        return VerdictPart("open", "the runs have no s_rel.")
    numbers = {"quantity": "s_rel", "s_rel": s_rel, "tolerance": tolerance}
    if abs(s_rel - 1) <= tolerance:
        return VerdictPart("holds", f"s_rel = {s_rel:.4g}: the scale of the token-layer mean.", numbers)
    match = f"; λ_R = {method.coef / s_rel:.4g} would have it" if s_rel and method.coef else ""
    return VerdictPart("fails", f"s_rel = {s_rel:.4g} is not the scale of the token-layer mean{match}.", numbers)


def with_tolerance(comparison: Comparison, thresholds: Thresholds) -> Comparison:
    """The comparison with a tolerance: the one it states, else `quality_tolerance` of the baseline's PPL, if it has one."""
    base = comparison.baseline_method
    ppl = None if base is None else base.mean("ppl")
    if comparison.quality.tolerance_ppl is not None or ppl is None:
        return comparison
    share = thresholds.quality_tolerance
    stated = f"{100 * share:.3g} % of the baseline's PPL, the default"
    return replace(comparison, quality=replace(comparison.quality, tolerance_ppl=share * ppl, tolerance=stated))


def quality_accepted(stated: Verdict, evaluated: Verdict, tolerance_ppl: float | None) -> bool:
    """Whether the quality of a method is acceptable, from its verdict as a file states it and as it is evaluated.

    The quality part if it holds or fails, else the verdict of a file without parts, else whether the mean PPL stays within
    the tolerance.
    """
    part = None if evaluated.parts is None else evaluated.parts.quality
    if part is not None and part.state != "open":
        return part.state == "holds"
    if stated.reasons is None and stated.accepted is not None:
        return stated.accepted
    return stated.delta_ppl is not None and tolerance_ppl is not None and stated.delta_ppl <= tolerance_ppl


def evaluated_comparison(
    comparison: Comparison, thresholds: Thresholds, *, stated_thresholds: bool = False
) -> Comparison:
    """The comparison with a tolerance and a verdict on every method; what it states is kept.

    With `stated_thresholds` the optimizer parts are evaluated again. A file without parts (an older one, or one written by
    hand) has no per-block validation: its quality and coordinate can fail or stay open, and never hold.
    """
    comparison, verdicts = with_tolerance(comparison, thresholds), []
    for stated in comparison.quality.methods:
        method = next((m for m in comparison.methods if (m.method, m.coef) == (stated.method, stated.coef)), None)
        if method is None:
            verdicts.append(stated)
        elif stated.reasons is None:
            verdicts.append(_from_file(comparison, method, stated, thresholds))
        elif stated_thresholds and stated.parts is not None:
            parts = replace(stated.parts, optimizer=judge_optimizer(comparison, method, thresholds))
            verdicts.append(with_parts(stated, parts))
        else:
            verdicts.append(stated)
    return replace(comparison, quality=replace(comparison.quality, methods=tuple(verdicts)))


def _from_file(comparison: Comparison, method: ComparedMethod, stated: Verdict, thresholds: Thresholds) -> Verdict:
    """`stated` with verdict, reasons and parts from the means and differences in the file."""
    base = comparison.baseline_method
    if base is None or method is base:
        return stated
    if method.method.split(" + ")[0] in (CE, OFF):
        coordinate = None
    elif comparison.router is not None:
        coordinate = _router_scale(comparison, method, thresholds)
    elif method.method in LOWER_THE_SHIFT:
        # p99 |μ| of each in the coordinate that it deploys.
        before, after = base.mean("mu_abs_99"), method.mean("mu_abs_99")
        coordinate = _without_interval("|μ|", "p99 |μ|", after / before if before and after is not None else None)
    else:
        key = comparison.quality.diagnosed
        found = None if method.paired is None else method.paired.same_coordinate.of(stated.coordinate).get(key)
        coordinate = _without_interval(key, key, None if found is None else found.ratio)
    quality = _quality_from_file(base, method, comparison.quality.tolerance_ppl)
    return with_parts(stated, VerdictParts(coordinate, quality, judge_optimizer(comparison, method, thresholds)))


def _without_interval(quantity: str, symbol: str, ratio: float | None) -> VerdictPart:
    shown = "" if ratio is None else f"{symbol} × {ratio:.4g} without an interval; "
    return VerdictPart("open", f"{shown}{RUN_AGAIN}.", {"quantity": quantity, "ratio": ratio})


def _quality_from_file(base: ComparedMethod, method: ComparedMethod, tolerance_ppl: float | None) -> VerdictPart:
    ppl = base.mean("ppl")
    if ppl is None or ppl <= 0 or tolerance_ppl is None:
        return VerdictPart("open", "the file has no baseline PPL.")
    found = None if method.paired is None else method.paired.deployed.get("ce")
    if found is None:
        return VerdictPart("open", f"the file has no CE per seed; {RUN_AGAIN}.")
    interval = paired_interval(found.by_seed, 0.0, 0)
    return judge_quality(interval, baseline_ppl=ppl, tolerance_ppl=tolerance_ppl)
