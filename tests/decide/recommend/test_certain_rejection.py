"""An arm stops only where its rejection at the end is certain: never before the whole run's rule would say the same."""

from __future__ import annotations

import math
from dataclasses import replace

from zloss.decide.recommend.certain_rejection import certain_rejection, least_endpoints
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.endpoints import judge_endpoints
from zloss.decide.verdicts.optimizer import endpoint_limits
from zloss.optimizer.endpoints import endpoints
from zloss.results.step_record import AdamSample, StepRecord

STEPS = 100


def step(number: int, norm: float = 1.0, loss: float = 3.0) -> StepRecord:
    adam = AdamSample(1e-4, 1.0, 1.0, 1.0, 1.0, 10.0)
    return StepRecord(number, loss, loss, 0.0, norm, norm / 10, 10.0, norm, norm / 10, adam=adam)


CALM = [step(i) for i in range(1, STEPS + 1)]
BASELINE = endpoints(CALM, clip=1.0).flat()


def reason(records: list[StepRecord]) -> str | None:
    return certain_rejection(records, BASELINE, steps=STEPS, spike=0.5, thresholds=Thresholds())


def test_a_calm_arm_is_never_stopped() -> None:
    assert all(reason(CALM[:done]) is None for done in range(1, STEPS + 1))


def test_a_gradient_far_above_all_of_ce_stops_at_once() -> None:
    found = reason([*CALM[:4], step(5, norm=3.5)])
    assert found is not None
    assert found.startswith("max ‖g‖₂ × 3.5")
    assert reason([*CALM[:4], step(5, norm=2.9)]) is None


def test_a_nonfinite_step_stops() -> None:
    bad = replace(step(2), gradient="nan", grad_norm=math.nan, grad_inf=math.nan)
    assert "nonfinite" in (reason([CALM[0], bad]) or "")


def test_events_are_counted_over_the_whole_run_not_over_the_steps_so_far() -> None:
    spikes = [step(1), step(2, loss=4.0), step(3), step(4, loss=4.0)]
    # Two of 99 pairs are 0.0202, just above the limit of 0.02; one is below, though a third of the steps so far.
    assert reason(spikes[:3]) is None
    assert "spike rate" in (reason(spikes) or "")


def test_no_arm_is_stopped_that_the_whole_run_would_not_reject() -> None:
    """Whatever the remaining steps are, the least endpoints are not above those of the finished run."""
    wild = [step(i, norm=1 + (i * 7919 % 23), loss=3 + (i * 31 % 5) / 4) for i in range(1, STEPS + 1)]
    events = [key for key in BASELINE if key.startswith("phi_")]
    whole = endpoints(wild, clip=1.0).flat()
    for done in range(1, STEPS + 1):
        least = least_endpoints(wild[:done], events, steps=STEPS, spike=0.5)
        assert all(value is None or value <= whole[key] + 1e-12 for key, value in least.items()), done
    assert reason(wild) is not None
    limits = endpoint_limits(Thresholds(), BASELINE.keys() & whole.keys(), STEPS)
    assert judge_endpoints(limits, [(BASELINE, whole)]).state == "fails"
