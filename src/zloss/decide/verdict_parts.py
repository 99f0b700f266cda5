"""The three parts of a verdict on a method: the coordinate it is meant to lower, the quality of the model, and the optimizer.

Each part holds, fails or is open, with a sentence and the numbers behind it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zloss.decide.intervals import (
    BEYOND,
    LARGEST_EXPONENT,
    LEAST_GROUPS,
    QUANTILES,
    BlockValues,
    PairedInterval,
    effect_interval,
    judged_level,
    paired_interval,
    quality_interval,
)
from zloss.decide.stages import signed
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.comparison import FEW_STEPS, ComparedMethod, Comparison, Interval, State, VerdictPart
from zloss.results.run_metrics import RunMetrics
from zloss.results.steps import PHI

Pairs = Sequence[tuple[RunMetrics, RunMetrics]]
"""(baseline, method) of every common seed."""
EFFECT = math.log(0.99)
"""A quantity is lowered if the upper end of its log ratio is at most this: at least 1 % lower."""
Endpoints = Mapping[str, float | None]
RATIO, NATS = "ratio", "nats per token"
"""Units of intervals: method / baseline, and method − baseline."""
RUN_AGAIN = "the runs have no per-block validation: run them again"
FEW_STEPS_P999 = 1000
"""With fewer steps a p99.9 over steps is little more than the maximum."""


def all_must_hold(parts: Sequence[VerdictPart]) -> VerdictPart:
    """One part from several questions: it fails if one fails, and holds if all hold.

    Numbers and interval come from the first question with the joint state; `questions` has the numbers of all.
    """
    if len(parts) == 1:
        return parts[0]
    states = {part.state for part in parts}
    state: State = "fails" if "fails" in states else "open" if "open" in states else "holds"
    first = next(part for part in parts if part.state == state)
    reason = " ".join(part.reason for part in parts if state == "holds" or part.state == state)
    return VerdictPart(state, reason, {**first.numbers, "questions": [part.numbers for part in parts]}, first.interval)


@dataclass(frozen=True)
class EndpointLimit:
    """When one endpoint is beyond its limit."""

    key: str
    """Key of metrics.json."""
    symbol: str
    relation: Literal["ratio", "increase", "falls"]
    """ "ratio": above `limit` times the baseline; "increase": above the baseline by `limit`; "falls": below the baseline
    divided by `limit`."""
    limit: float

    def excess(self, baseline: float, method: float) -> float:
        """What is held against the limit: method − baseline, method / baseline, or baseline / method where less is worse."""
        if self.relation == "increase":
            return method - baseline
        worse, reference = (baseline, method) if self.relation == "falls" else (method, baseline)
        return worse / reference if reference > 0 else math.inf if worse > 0 else 0.0

    def passed(self, baseline: float, method: float) -> bool:
        """Whether the method is beyond the limit."""
        return self.excess(baseline, method) > self.limit

    def sentence(self, baseline: float, method: float) -> str:
        """What was measured against which limit."""
        if self.relation == "ratio" and baseline > 0:
            return f"{self.symbol} × {method / baseline:.3g} (limit × {self.limit:g})"
        sign = {"increase": "+", "falls": "÷ ", "ratio": "× "}[self.relation]
        return f"{self.symbol} {baseline:.3g} → {method:.3g} (limit {sign}{self.limit:g})"


def endpoint_limits(thresholds: Thresholds, keys: Iterable[str], steps: int | None = None) -> tuple[EndpointLimit, ...]:
    """The limits of every endpoint among `keys`.

    Over fewer than 100 steps a p99 is little more than the maximum, so the maximum alone is evaluated there; likewise the
    p99.9 below 1000 steps. A file without the maximum is evaluated by the quantile that it has.
    """
    known = set(keys)
    tail, largest, adam = thresholds.grad_tail_ratio, thresholds.grad_max_ratio, thresholds.adam_state_ratio
    if steps is not None and "grad_norm_max" in known:
        known -= {"grad_norm_p99", "grad_inf_p99"} if steps < FEW_STEPS else set()
        known -= {"grad_norm_p999"} if steps < FEW_STEPS_P999 else set()
    events = sorted((key for key in known if key.startswith(PHI)), key=lambda key: (len(key), key))
    limits = (
        EndpointLimit("grad_norm_p99", "p99 ‖g‖₂", "ratio", tail),
        EndpointLimit("grad_norm_max", "max ‖g‖₂", "ratio", largest),
        EndpointLimit("grad_norm_p999", "p99.9 ‖g‖₂", "ratio", tail),
        EndpointLimit("grad_inf_p99", "p99 ‖g‖∞", "ratio", tail),
        EndpointLimit("grad_inf_max", "max ‖g‖∞ (fp16 margin 65504/‖g‖∞)", "ratio", largest),
        EndpointLimit("kappa_min", "largest safe fp16 scale κ", "falls", thresholds.fp16_margin_ratio),
        *(EndpointLimit(e, f"Φ_{e.removeprefix(PHI)}", "increase", thresholds.event_rate_increase) for e in events),
        EndpointLimit("nonfinite_gradient", "share of steps with a nonfinite gradient", "increase", 0.0),
        EndpointLimit("nonfinite_microbatch", "share of nonfinite micro-batches", "increase", 0.0),
        EndpointLimit("adam_v_max", "max ‖v‖∞ of Adam", "ratio", adam),
        EndpointLimit("adam_v_p99", "p99 ‖v‖∞ of Adam", "ratio", adam),
        EndpointLimit("spike_rate", "spike rate", "increase", thresholds.spike_rate_increase),
    )
    return tuple(limit for limit in limits if limit.key in known)


def judge_optimizer(comparison: Comparison, method: ComparedMethod, thresholds: Thresholds) -> VerdictPart | None:
    """The part of one method of a comparison; None without a baseline or without an endpoint of both.

    It reads every seed that both have, or the means where the file has no values by seed.
    """
    base = comparison.baseline_method
    if base is None or base is method:
        return None
    limits = endpoint_limits(thresholds, base.metrics.keys() & method.metrics.keys(), comparison.steps)
    if not limits:
        return None
    common = [seed for seed in method.seeds if seed in base.seeds]
    if not common or any(each.by_seed is None for side in (base, method) for each in side.metrics.values()):
        return judge_endpoints(limits, [(_endpoints(base), _endpoints(method))])
    return judge_endpoints(limits, [(_endpoints(base, seed), _endpoints(method, seed)) for seed in common])


def _endpoints(side: ComparedMethod, seed: int | None = None) -> Endpoints:
    """The metrics of one seed, or their means."""
    place = None if seed is None else side.seeds.index(seed)
    return {
        key: each.mean if place is None or each.by_seed is None else each.by_seed[place]
        for key, each in side.metrics.items()
    }


def judge_endpoints(limits: Sequence[EndpointLimit], pairs_S: Sequence[tuple[Endpoints, Endpoints]]) -> VerdictPart:
    """Does the method send the optimizer worse gradients? Over all endpoints that both runs of every seed hold.

    An endpoint that is beyond its limit on every seed fails; on some seeds it is open.
    """
    failed, partly, checked = list[str](), list[str](), list[str]()
    for limit in limits:
        values = [(base.get(limit.key), run.get(limit.key)) for base, run in pairs_S]
        known = [(base, run) for base, run in values if base is not None and run is not None]
        if not known or len(known) < len(values):
            continue
        checked.append(limit.key)
        passed = sum(limit.passed(*pair) for pair in known)
        worst = limit.sentence(*max(known, key=lambda pair: limit.excess(*pair)))
        if passed == len(known):
            failed.append(worst)
        elif passed:
            partly.append(f"{worst} on {passed} of {len(known)} seeds")
    numbers = {"seeds": len(pairs_S), "endpoints": checked, "passed": failed, "passed_on_some_seeds": partly}
    if not checked:
        return VerdictPart("open", "the runs have no optimizer-facing endpoint for both method and baseline.", numbers)
    if failed:
        return VerdictPart("fails", "; ".join(failed) + ".", numbers)
    if partly:
        return VerdictPart("open", "; ".join(partly) + "; more seeds would settle it.", numbers)
    return VerdictPart("holds", f"all {len(checked)} endpoints are within their limits.", numbers)


def judge_effect(
    name: str, pairs_S: Sequence[tuple[BlockValues, BlockValues]], wanted: float | None = QUANTILES[0]
) -> VerdictPart:
    """Whether `name` falls by at least 1 %, from (baseline, method) of every seed; `wanted`: its quantile, None for its mean.

    d_s = log(q_method / q_baseline) for a quantile or a mean q over validation tokens. The part holds if the upper end of
    the interval is at most log 0.99, fails ("no effect") if the lower end is above it, else it is open.
    """
    if not pairs_S:
        return VerdictPart("open", f"{name}: the runs did not record it per block; run them again.")
    tokens, seeds = sum(pairs_S[0][0].tokens_B), len(pairs_S)
    level = None if wanted is None else judged_level(tokens, wanted)
    shown, numbers = f"mean of {name}", {"quantity": name, "level": level}
    if wanted is not None:
        if level is None:
            few = f"{tokens} validation tokens leave fewer than {BEYOND} beyond the 95 % quantile"
            return VerdictPart("open", f"{name}: {few}; validate on more text.")
        shown = f"p{100 * level:g} of {name}"
        if level < wanted:
            # The ratio at the quantile that is meant is shown too.
            shown += f" (p{100 * wanted:g} has fewer than {BEYOND} tokens beyond it)"
            meant = [(base.quantile(wanted), run.quantile(wanted)) for base, run in pairs_S]
            if all(before > 0 and after > 0 for before, after in meant):
                ratio = statistics.geometric_mean(after / before for before, after in meant)
                numbers |= {"unjudged_level": wanted, "unjudged_ratio": ratio}
        if all(run.quantile(level) == 0 and base.quantile(level) > 0 for base, run in pairs_S):
            numbers |= {"ratio": 0.0, "seeds": seeds}
            if seeds < 2:
                return VerdictPart("open", f"one seed: {shown} is 0; run at least one more seed.", numbers)
            return VerdictPart("holds", f"{shown} is 0 on every seed.", numbers, Interval(0.0, 0.0, RATIO))
    interval = effect_interval(pairs_S, level)
    if interval is None:
        return VerdictPart("open", f"{shown} is zero or not finite on some seed, so no ratio exists.", numbers)
    return judge_ratio(shown, interval, numbers)


def judge_ratio(shown: str, interval: PairedInterval, numbers: Mapping[str, Any]) -> VerdictPart:
    """The part of a log ratio and its interval."""
    state, more = interval.against(EFFECT), interval.needed(EFFECT)
    ratio, low, high = (
        math.exp(min(log, LARGEST_EXPONENT)) for log in (interval.difference, interval.lower, interval.upper)
    )
    settle = interval.seeds_to_settle(EFFECT)
    numbers = {**numbers, "ratio": ratio, "seeds": interval.seeds, "groups": interval.groups, "seeds_to_settle": settle}
    if not math.isfinite(interval.upper):
        why = "one seed" if interval.seeds < 2 else "one group of validation text"
        return VerdictPart("open", f"{why}: {shown} × {ratio:.4g}; {more}.", numbers)
    span = f"{shown} × {ratio:.4g} ({low:.4g} to {high:.4g})"
    reason = {"fails": f"no effect: {span}, not at least 1 % lower", "holds": span, "open": f"{span}; {more}"}[state]
    return VerdictPart(state, f"{reason}.", numbers, Interval(low, high, RATIO))


def quality_part(pairs: Pairs, tolerance_ppl: float) -> VerdictPart:
    """Is the validation CE within the tolerance of the baseline's? From the validation blocks of every seed."""
    if any(base.ce is None for base, _ in pairs):
        return VerdictPart("open", "the baseline's validation CE is not finite on some seed.")
    if any(run.ce is None or run.valid_nonfinite.nan or run.valid_nonfinite.inf for _, run in pairs):
        return VerdictPart("fails", "its validation CE is not finite on every token and seed.")
    finite = [(base.ce, run.ce) for base, run in pairs if base.ce is not None and run.ce is not None]
    baseline_ppl = math.exp(statistics.fmean(base for base, _ in finite))
    blocks = [(base.validation_blocks, run.validation_blocks) for base, run in pairs]
    both = [(base, run) for base, run in blocks if base is not None and run is not None]
    if len(both) < len(blocks) or any(base.tokens != run.tokens or None in base.ce + run.ce for base, run in both):
        # The spread over text is unknown, so quality fails or stays open.
        interval = paired_interval([run - base for base, run in finite], 0.0, 0)
    else:
        interval = quality_interval(both)
    return judge_quality(interval, baseline_ppl=baseline_ppl, tolerance_ppl=tolerance_ppl)


def judge_quality(interval: PairedInterval, *, baseline_ppl: float, tolerance_ppl: float) -> VerdictPart:
    """Holds if Δ + h ≤ tolerance, fails if Δ − h > tolerance, else open; open with one seed, never holds below 8 groups."""
    if not baseline_ppl > 0:
        raise InputError(
            f"the PPL of the baseline is expected to be above 0, but is {baseline_ppl:g}: its run is damaged."
        )
    # A tolerance of −100 % of the PPL and less asks for a CE of −∞, which no method reaches.
    share = tolerance_ppl / baseline_ppl
    tolerance = math.log1p(share) if share > -1 else -math.inf

    def ppl(nats: float) -> float | None:
        return baseline_ppl * math.expm1(nats) if math.isfinite(nats) and nats <= LARGEST_EXPONENT else None

    state = interval.against(tolerance)
    if state == "holds" and interval.groups < LEAST_GROUPS:
        state = "open"
    bounds = Interval(interval.lower, interval.upper, NATS) if math.isfinite(interval.upper) else None
    numbers = {
        "delta_ce": interval.difference,
        "half_width": _finite(interval.half_width),
        "delta_ppl": ppl(interval.difference),
        "lower_ppl": ppl(interval.lower),
        "upper_ppl": ppl(interval.upper),
        "tolerance_ce": _finite(tolerance),
        "tolerance_ppl": tolerance_ppl,
        "smallest_tolerance_ppl": ppl(interval.upper) if interval.groups >= LEAST_GROUPS else None,
        "seeds": interval.seeds,
        "groups": interval.groups,
        "seeds_to_settle": interval.seeds_to_settle(tolerance),
        "seed_half_width": _finite(interval.seed_part),
        "text_half_width": _finite(interval.group_part) if interval.groups else None,
    }
    return VerdictPart(state, _quality_reason(interval, state, tolerance, numbers), numbers, bounds)


def _quality_reason(interval: PairedInterval, state: State, tolerance: float, numbers: Mapping[str, Any]) -> str:
    upper, span = _ppl(numbers["upper_ppl"]), quality_span(numbers)
    if not math.isfinite(interval.half_width):
        why = "one seed" if interval.seeds < 2 else "one group of validation text"
        return f"{why}: {span}; {interval.needed(tolerance)}."
    if state == "fails":
        return f"{span}."
    if state == "holds":
        return f"{span}; the smallest tolerance that still holds is {upper} PPL."
    if not interval.groups:
        return f"{span}; {RUN_AGAIN}."
    if interval.groups < LEAST_GROUPS:
        return f"{span}; the runs recorded {interval.groups} groups of validation text, but at least {LEAST_GROUPS} are needed."
    return f"{span}; a tolerance of {upper} PPL would hold, or {interval.needed(tolerance)}."


def quality_span(numbers: Mapping[str, Any]) -> str:
    """ΔCE with its interval, from the numbers of a quality part, in a phrase."""
    delta, half = signed(numbers["delta_ce"], 4), numbers.get("half_width")
    if half is None:
        return f"ΔCE = {delta} nat ({_ppl(numbers.get('delta_ppl'))} PPL) without an interval"
    lower, upper = (_ppl(numbers.get(key)) for key in ("lower_ppl", "upper_ppl"))
    return f"ΔCE = {delta} ± {half:.2g} nat ({lower} to {upper} PPL; tolerance {numbers['tolerance_ppl']:.3g} PPL)"


def _ppl(change: float | None) -> str:
    return "∞" if change is None else signed(change)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
