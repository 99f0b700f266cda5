"""Whether a running arm will be rejected whatever its remaining steps bring.

Only endpoints that cannot fall again are read: maxima, and counts of events over the number of steps of the whole run. Where
one of them is beyond its limit against the finished CE run, the optimizer part of the one-seed verdict fails at the end too.
The rank of an arm never stops it: early PPL favours CE, and an early P_Z the largest λ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.optimizer import endpoint_limits
from zloss.results.step_endpoints import PHI
from zloss.results.step_record import StepRecord


def certain_rejection(
    records: Sequence[StepRecord],
    baseline: Mapping[str, float | None],
    *,
    steps: int,
    spike: float,
    thresholds: Thresholds,
) -> str | None:
    """The endpoint that rejects the arm, in a phrase; None while it may still be accepted.

    `records`: the steps so far; `baseline`: the endpoints of the CE run by key; `steps`: steps of the whole run.
    """
    least = least_endpoints(records, [key for key in baseline if key.startswith(PHI)], steps=steps, spike=spike)
    for limit in endpoint_limits(thresholds, least.keys() & baseline.keys(), steps):
        before, after = baseline[limit.key], least.get(limit.key)
        if limit.passed(before, after):
            assert before is not None
            assert after is not None
            return limit.sentence(before, after)
    return None


def least_endpoints(
    records: Sequence[StepRecord], events: Sequence[str], *, steps: int, spike: float
) -> dict[str, float | None]:
    """The smallest values that the endpoints of the whole run can still have; `events` are keys of Φ_τ."""
    bad = [record.gradient != "finite" for record in records]
    micro = sum(record.micro_batches for record in records)
    whole_micro = steps * (micro / len(records)) if records else 0
    losses = [record.loss for record in records]
    spikes = sum(not math.isfinite(now) or now - before > spike for before, now in itertools.pairwise(losses))
    found: dict[str, float | None] = {
        "grad_norm_max": _largest(record.grad_norm for record in records),
        "grad_inf_max": _largest(record.grad_inf for record in records),
        "adam_v_max": _largest(record.adam.v_inf for record in records if record.adam is not None),
        "nonfinite_gradient": sum(bad) / steps,
        "nonfinite_microbatch": sum(r.micro_nan + r.micro_inf for r in records) / whole_micro if whole_micro else None,
        "spike_rate": spikes / (steps - 1) if steps > 1 else None,
    }
    for key in events:
        threshold = float(key.removeprefix(PHI))
        passed = sum(b or record.grad_norm > threshold for b, record in zip(bad, records, strict=True))
        found[key] = passed / steps
    return found


def _largest(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else None
