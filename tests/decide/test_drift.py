"""The rule of drift on made-up checkpoints: noise, limits, still stretches, and the step at which a movement began."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.decide.made_up_drift import evaluated, kept, made_up_drift, made_up_run
from zloss.decide.drift import DriftLimits, within_audit_limit
from zloss.errors import InputError
from zloss.results.drift import Drift, Movement


def movement(drift: Drift, key: str = "mu_abs_99", coordinate: str = "raw") -> Movement:
    (found,) = (each for each in drift.movements if (each.quantity, each.coordinate) == (key, coordinate))
    return found


def test_a_slow_shift_is_found_over_the_whole_still_stretch() -> None:
    """No two neighbors differ by a nat; the ends do."""
    found = made_up_drift([5.0, 5.0, 5.4, 5.8, 6.2, 6.6, 7.0])
    shift = movement(found)
    assert (shift.state, shift.to_step) == ("invisible", 700)
    assert shift.from_step <= 200
    assert 300 <= shift.began <= 600
    assert found.began == shift.began


@pytest.mark.parametrize(
    ("shifts", "ces", "state", "last_before", "began"),
    [
        ([12.0, 12.0, 6.0, 3.0], None, "invisible", 200, 300),  # a shift that falls counts too
        ([0.0, 0.0, 3.0], None, "invisible", 200, 300),  # from exactly zero
        ([0.1, 0.1, 0.4, 0.4], None, "quiet", None, None),  # four times a tenth of a nat is below one nat
        ([40.0, 40.0, 42.0, 42.0], None, "quiet", None, None),  # two nats are below a tenth of forty
        ([2, 4, 8], [3.0, 2.8, 2.6], "with_ce", 100, 200),
        ([2, 5, 8], [3.0, 2.5, 3.0], "with_ce", 100, 200),  # CE is the same at both ends, but not between them
        # Only the still part of a run is blamed.
        ([2, 2, 2, 2, 9], [4.0, 3.5, 3.0, 3.0, 3.0], "invisible", 400, 500),
    ],
)
def test_what_moved_while_ce_stood_still_and_since_when(
    shifts: list[float], ces: list[float] | None, state: str, last_before: int | None, began: int | None
) -> None:
    found = made_up_drift(shifts, ces)
    shift = movement(found)
    assert (shift.state, shift.last_before, shift.began) == (state, last_before, began)
    assert found.began == (began if state == "invisible" else None)
    if state == "quiet":
        assert {each.state for each in found.movements} == {"quiet"}
    if state == "invisible":
        assert f"{'rose' if shifts[-1] > shifts[0] else 'fell'} from" in found.finding
    if state == "with_ce":
        assert found.finding.startswith("CE moved between all adjacent")
        assert "Softmax does not depend on μ" in found.finding


def test_what_moved_with_ce_has_a_name_a_meaning_and_the_limit_of_an_audit() -> None:
    """It was a symbol and two numbers, without a yardstick."""
    said = made_up_drift([2, 4, 5.9], [3.0, 2.8, 2.6]).finding
    shift, log_v = movement(made_up_drift([2, 4, 5.9], [3.0, 2.8, 2.6])), math.log(512)
    assert (
        f"common shift (p99 |μ|, the mean logit, which softmax does not see) {shift.before:.4g} → {shift.after:.4g}"
        in said
    )
    assert shift.after > log_v
    assert f"beyond the limit of {log_v:.3g};" in said
    small = made_up_drift([0.5, 2, 2], [3.0, 2.8, 2.6])
    assert within_audit_limit(movement(small), 512)
    assert f"within the limit of {log_v:.3g}, so it does not matter" in small.finding


def test_noise_of_the_text_is_subtracted() -> None:
    """With the same tokens in every block the noise of the change is that of the groups; wide limits are not needed."""
    run = made_up_run([2.0, 2.0, 9.0])
    shift = movement(evaluated(run))
    assert 0 < shift.noise < 1
    assert shift.level == 0.95  # 1600 tokens leave 16 beyond the p99
    before, after = (np.quantile(np.concatenate(run[i].blocks.tails["shift.raw"]), 0.95) for i in (0, 2))
    for share, state in ((0.5, "quiet"), (2.0, "invisible")):
        limits = DriftLimits(least_nats=after - before - share * shift.noise)
        assert movement(evaluated(run, limits)).state == state, share


def test_ce_that_drifts_in_small_steps_is_not_still() -> None:
    """Neighbours are within the tolerance, the ends of the run are not; the shift moves only over the whole run."""
    found = made_up_drift([5.0, 5.3, 5.6, 5.9], ces=[3.0, 3.006, 3.012, 3.018])
    assert all(change.still for change in found.ce_changes)
    shift = movement(found)
    assert (shift.state, shift.from_step, shift.to_step) == ("with_ce", 100, 400)


def test_the_tolerance_is_on_the_whole_interval_of_the_paired_change() -> None:
    inside, outside = (evaluated([kept(1), kept(2, ce=3.0 + gap, seed=1)]).ce_changes[0] for gap in (0.005, 0.015))
    assert (inside.still, outside.still) == (True, False)
    assert inside.difference == pytest.approx(0.005, abs=1e-3)
    assert inside.half_width < 1e-3  # paired: the spread between blocks, 0.3 nat, is not in it
    wide = DriftLimits(ppl_tolerance=0.02)
    assert evaluated([kept(1), kept(2, ce=3.015, seed=1)], wide).ce_changes[0].still


def test_a_number_of_the_weights_has_no_noise() -> None:
    found = evaluated([kept(1), kept(2, sigma=5.4), kept(3, sigma=5.6)])
    sigma = movement(found, "sigma_1")
    assert (sigma.state, sigma.began, sigma.noise) == ("invisible", 3, None)


def test_missing_numbers_are_open_and_a_nonfinite_ce_is_not_still() -> None:
    run = made_up_run([2, 2, 9])
    blind = [
        replace(each, checkpoint=replace(each.checkpoint, raw=replace(each.checkpoint.raw, r_z=None))) for each in run
    ]
    assert movement(evaluated(blind), "r_z").state == "open"
    unkept = [replace(each, blocks=replace(each.blocks, tails={})) for each in run]
    assert movement(evaluated(unkept)).reason == "Common shift (p99 |μ|): its noise on this text is unknown."
    broken = [replace(each, blocks=replace(each.blocks, ce=(None, *each.blocks.ce[1:]))) for each in run]
    found = evaluated(broken)
    assert not any(change.still for change in found.ce_changes)
    assert found.ce_changes[0].difference is None


def test_other_tokens_and_too_few_checkpoints_are_refused() -> None:
    run = made_up_run([2, 2])
    with pytest.raises(InputError, match="same tokens"):
        evaluated([run[0], replace(run[1], tokens="others")])
    with pytest.raises(InputError, match="at least two"):
        evaluated(run[:1])
    with pytest.raises(InputError, match="`least_nats`"):
        DriftLimits(least_nats=math.nan)


def test_the_record_lists_what_moved_in_short() -> None:
    drift = made_up_drift([0.0, 0.0, 40.0, 40.0])
    moved = [each for each in drift.movements if each.state in ("invisible", "with_ce")]
    assert [(each.quantity, each.began) for each in drift.findings] == [(each.quantity, each.began) for each in moved]
    shift = next(each for each in drift.to_dict()["findings"] if each["quantity"] == "mu_abs_99")
    assert shift == {"quantity": "mu_abs_99", "coordinate": "raw", "began": 300, "ce_invisible": True}
    assert Drift.from_dict(drift.to_dict()) == drift
