"""The optimizer-facing endpoints of a compared method: which are judged, at which limits, from which values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.endpoints import EndpointLimit, judge_endpoints
from zloss.results.comparison import FEW_STEPS, ComparedMethod, Comparison
from zloss.results.step_endpoints import PHI
from zloss.results.verdict import VerdictPart

FEW_STEPS_P999 = 1000
"""With fewer steps a p99.9 over steps is little else than the maximum."""

Endpoints = Mapping[str, float | None]


def endpoint_limits(thresholds: Thresholds, keys: Iterable[str], steps: int | None = None) -> tuple[EndpointLimit, ...]:
    """The limits of every endpoint among `keys`.

    Over fewer than 100 steps a p99 is little else than the maximum, so the maximum alone is judged there; likewise the
    p99.9 below 1000 steps. A file without the maximum is judged by the quantile that it has.
    """
    known = set(keys)
    tail, largest = thresholds.grad_tail_ratio, thresholds.grad_max_ratio
    short = steps is not None and steps < FEW_STEPS and "grad_norm_max" in known
    shorter = steps is not None and steps < FEW_STEPS_P999 and "grad_norm_max" in known
    limits = [EndpointLimit("grad_norm_max", "max ‖g‖₂", "ratio", largest)]
    if not short:
        limits.insert(0, EndpointLimit("grad_norm_p99", "p99 ‖g‖₂", "ratio", tail))
        limits.append(EndpointLimit("grad_inf_p99", "p99 ‖g‖∞", "ratio", tail))
    if not shorter:
        limits.insert(-1, EndpointLimit("grad_norm_p999", "p99.9 ‖g‖₂", "ratio", tail))
    limits.append(EndpointLimit("grad_inf_max", "max ‖g‖∞ (fp16 margin 65504/‖g‖∞)", "ratio", largest))
    limits.append(EndpointLimit("kappa_min", "smallest safe fp16 scale κ", "falls", thresholds.fp16_margin_ratio))
    events = sorted((key for key in known if key.startswith(PHI)), key=lambda key: (len(key), key))
    limits += [
        EndpointLimit(key, f"Φ_{key.removeprefix(PHI)}", "increase", thresholds.event_rate_increase) for key in events
    ]
    limits += [
        EndpointLimit("nonfinite_gradient", "share of steps with a nonfinite gradient", "any", 0.0),
        EndpointLimit("nonfinite_microbatch", "share of nonfinite micro-batches", "any", 0.0),
        EndpointLimit("adam_v_max", "max ‖v‖∞ of Adam", "ratio", thresholds.adam_state_ratio),
        EndpointLimit("adam_v_p99", "p99 ‖v‖∞ of Adam", "ratio", thresholds.adam_state_ratio),
        EndpointLimit("spike_rate", "spike rate", "increase", thresholds.spike_rate_increase),
    ]
    return tuple(limit for limit in limits if limit.key in known)


def judge_optimizer(comparison: Comparison, method: ComparedMethod, thresholds: Thresholds) -> VerdictPart | None:
    """The part of one method of a comparison; None without a baseline or without an endpoint of both."""
    base = comparison.baseline_method
    if base is None or base is method:
        return None
    limits = endpoint_limits(thresholds, base.metrics.keys() & method.metrics.keys(), comparison.steps)
    if not limits:
        return None
    return judge_endpoints(limits, endpoint_pairs(base, method))


def endpoint_pairs(base: ComparedMethod, method: ComparedMethod) -> list[tuple[Endpoints, Endpoints]]:
    """(baseline, method) of every common seed; one pair of means where the file has no values by seed."""
    places = [(base.seeds.index(seed), i) for i, seed in enumerate(method.seeds) if seed in base.seeds]
    by_seed = all(summary.by_seed is not None for side in (base, method) for summary in side.metrics.values())
    if not places or not by_seed:
        return [(_means(base), _means(method))]
    return [(_at(base, i), _at(method, j)) for i, j in places]


def _means(method: ComparedMethod) -> Endpoints:
    return {key: summary.mean for key, summary in method.metrics.items()}


def _at(method: ComparedMethod, place: int) -> Endpoints:
    return {key: summary.by_seed[place] for key, summary in method.metrics.items() if summary.by_seed is not None}
