"""The rule of drift on made-up checkpoints: noise, limits, still stretches, and the step at which a movement began."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.decide.made_up_drift import evaluated, kept, made_up_drift, made_up_run
from zloss.decide.drift import DriftLimits
from zloss.errors import InputError
from zloss.results.drift import Drift, Movement


def movement(movements: tuple[Movement, ...], key: str, coordinate: str = "raw") -> Movement:
    (found,) = (each for each in movements if (each.quantity, each.coordinate) == (key, coordinate))
    return found


def test_a_slow_shift_is_found_over_the_whole_still_stretch() -> None:
    """No two neighbours differ by a nat; the ends do."""
    found = made_up_drift([5.0, 5.0, 5.4, 5.8, 6.2, 6.6, 7.0])
    shift = movement(found.movements, "mu_abs_99")
    assert shift.state == "invisible"
    assert shift.from_step is not None
    assert shift.from_step <= 200
    assert shift.to_step == 700
    assert shift.began is not None
    assert 300 <= shift.began <= 600
    assert found.began == shift.began


def test_a_shift_that_falls_counts_too() -> None:
    found = made_up_drift([12.0, 12.0, 6.0, 3.0])
    shift = movement(found.movements, "mu_abs_99")
    assert (shift.state, shift.last_before, shift.began) == ("invisible", 200, 300)
    assert "fell from" in found.finding


def test_a_shift_from_exactly_zero_is_seen() -> None:
    found = made_up_drift([0.0, 0.0, 3.0])
    assert movement(found.movements, "mu_abs_99").began == 300
    assert movement(found.movements, "mu_rms").state == "invisible"


@pytest.mark.parametrize(("before", "after"), [(0.1, 0.4), (40.0, 42.0)])
def test_small_changes_stay_quiet(before: float, after: float) -> None:
    """Four times a tenth of a nat is below one nat; two nats are below a tenth of forty."""
    found = made_up_drift([before, before, after, after])
    assert {each.state for each in found.movements} == {"quiet"}
    assert found.began is None


def test_noise_of_the_text_is_subtracted() -> None:
    """With the same tokens in every block the noise of the change is that of the groups; wide limits are not needed."""
    shift = movement(made_up_drift([2.0, 2.0, 9.0]).movements, "mu_abs_99")
    assert shift.noise is not None
    assert 0 < shift.noise < 1
    assert shift.level == 0.95  # 1600 tokens leave 16 beyond the p99
    run = made_up_run([2.0, 2.0, 9.0])
    before, after = (np.quantile(np.concatenate(run[i].blocks.tails["shift.raw"]), 0.95) for i in (0, 2))
    for share, state in ((0.5, "quiet"), (2.0, "invisible")):
        limits = DriftLimits(least_nats=after - before - share * shift.noise)
        assert movement(evaluated(run, limits).movements, "mu_abs_99").state == state, share


def test_ce_that_drifts_in_small_steps_is_not_still() -> None:
    """Neighbours are within the tolerance, the ends of the run are not; the shift moves only over the whole run."""
    found = made_up_drift([5.0, 5.3, 5.6, 5.9], ces=[3.0, 3.006, 3.012, 3.018])
    assert all(change.still for change in found.ce_changes)
    shift = movement(found.movements, "mu_abs_99")
    assert (shift.state, shift.from_step, shift.to_step) == ("with_ce", 100, 400)


def test_movement_with_ce_is_not_called_invisible() -> None:
    found = made_up_drift([2, 4, 8], ces=[3.0, 2.8, 2.6])
    assert not any(change.still for change in found.ce_changes)
    assert movement(found.movements, "mu_abs_99").state == "with_ce"
    assert found.began is None
    assert found.finding.startswith("CE moved between every two")
    assert "Softmax does not depend on μ" in found.finding


def test_ce_that_leaves_and_comes_back_ends_a_stretch() -> None:
    """CE is the same at both ends, but not between them."""
    found = made_up_drift([2, 5, 8], ces=[3.0, 2.5, 3.0])
    assert movement(found.movements, "mu_abs_99").state == "with_ce"


def test_only_the_still_part_of_a_run_is_blamed() -> None:
    found = made_up_drift([2, 2, 2, 2, 9], ces=[4.0, 3.5, 3.0, 3.0, 3.0])
    shift = movement(found.movements, "mu_abs_99")
    assert (shift.state, shift.last_before, shift.began) == ("invisible", 400, 500)
    assert shift.from_step in (300, 400)
    assert [change.still for change in found.ce_changes] == [False, False, True, True]


def test_the_tolerance_is_on_the_whole_interval_of_the_paired_change() -> None:
    inside, outside = (evaluated([kept(1), kept(2, ce=3.0 + gap, seed=1)]).ce_changes[0] for gap in (0.005, 0.015))
    assert inside.still
    assert not outside.still
    assert inside.difference == pytest.approx(0.005, abs=1e-3)
    # Paired: the spread between blocks, 0.3 nat, is not in it.
    assert inside.half_width is not None
    assert inside.half_width < 1e-3
    wide = DriftLimits(ppl_tolerance=0.02)
    assert evaluated([kept(1), kept(2, ce=3.015, seed=1)], wide).ce_changes[0].still


def test_a_number_of_the_weights_has_no_noise() -> None:
    found = evaluated([kept(1), kept(2, sigma=5.4), kept(3, sigma=5.6)])
    sigma = movement(found.movements, "sigma_1")
    assert (sigma.state, sigma.began, sigma.noise) == ("invisible", 3, None)


def test_missing_numbers_are_open_and_a_nonfinite_ce_is_not_still() -> None:
    run = made_up_run([2, 2, 9])
    blind = [
        replace(each, checkpoint=replace(each.checkpoint, raw=replace(each.checkpoint.raw, r_z=None))) for each in run
    ]
    assert movement(evaluated(blind).movements, "r_z").state == "open"
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
    assert moved
    assert [(each.quantity, each.began) for each in drift.findings] == [(each.quantity, each.began) for each in moved]
    shift = next(each for each in drift.to_dict()["findings"] if each["quantity"] == "mu_abs_99")
    assert shift == {"quantity": "mu_abs_99", "coordinate": "raw", "began": 300, "ce_invisible": True}
    assert Drift.from_dict(drift.to_dict()) == drift
