"""Alerts: a change is reported once, with the step it began; noise, levels and slow developments are not."""

from __future__ import annotations

import json
import math
import random
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import pytest

from zloss.errors import InputError, TrainingAlertError
from zloss.telemetry.alerts import Alert, AlertMonitor, alert_action, exceeded_levels

NAMES = (
    *("mu_abs_p99", "p_z_999_raw", "p_z_999_centered", "gain_p99", "gain_centered_p99", "grad_norm_preclip"),
    *("adam_v_max", "fp16_margin"),
)


def run(
    monitor: AlertMonitor, steps: range, shift: object = lambda step: 1.0, ce: object = lambda step: 3.0
) -> list[Alert]:
    noise = random.Random(steps.start)
    found = []
    for step in steps:
        numbers = {name: 5 * noise.lognormvariate(0, 0.2) for name in NAMES}
        numbers["mu_abs_p99"] *= shift(step)  # type: ignore[operator]
        numbers["ce"] = ce(step) * noise.lognormvariate(0, 0.05)  # type: ignore[operator]
        found += monitor.observe(step, numbers)
    return found


def grown(step: int) -> float:
    return 4.0 if step >= 1000 else 1.0


def test_noise_gives_none() -> None:
    assert run(AlertMonitor(), range(1, 10_000)) == []


def test_a_slow_development_gives_none() -> None:
    """Ten times as large after 5000 steps."""
    assert run(AlertMonitor(), range(1, 5000), shift=lambda step: 10 ** (step / 5000)) == []


def test_a_grown_shift_is_reported_once_and_called_invisible_to_ce() -> None:
    monitor = AlertMonitor()
    found = run(monitor, range(1, 3000), shift=grown)
    assert [alert.quantity for alert in found] == ["mu_abs_p99"]
    (alert,) = found
    assert 1000 <= alert.step <= 1000 + 2 * monitor.window
    assert 1000 <= alert.began <= alert.step
    assert alert.ce_invisible
    assert "it cannot see this" in str(alert)
    assert monitor.active == ("mu_abs_p99",)


def test_a_shift_that_ce_sees_is_not_called_invisible() -> None:
    (alert,) = run(AlertMonitor(), range(1, 1500), shift=grown, ce=lambda step: 3.0 if step < 1000 else 5.0)
    assert not alert.ce_invisible
    assert "cannot see" not in str(alert)


def drift(monitor: AlertMonitor, steps: int, **changes: object) -> list[Alert]:
    """Steady numbers with noise; each change is a function of the step that gives one of them."""
    noise, found = random.Random(1), []
    for step in range(1, steps):
        numbers = {"ce": 3.0, "log_z_mean": 6.0, "p_z_mean_raw": 0.5, "gain_mean": 1.4, "grad_norm_preclip": 1.0}
        numbers |= {"fp16_margin": 4000.0, "adam_v_max": 1e-4}
        numbers |= {name: of(step) for name, of in changes.items()}  # type: ignore[operator]
        found += monitor.observe(step, {name: value * noise.gauss(1, 0.02) for name, value in numbers.items()})
    return found


@pytest.mark.parametrize("rate", [0.01, 0.02, -0.02, 0.1])
def test_a_growing_common_shift_is_dated_within_a_window(rate: float) -> None:
    """Mean log Z grows or falls by some nats a step from step 700 on; nothing else moves."""
    monitor = AlertMonitor()
    found = drift(monitor, 900, log_z_mean=lambda step: 6 + rate * max(0, step - 700))
    assert [alert.quantity for alert in found] == ["log_z_mean"]
    (alert,) = found
    assert 700 < alert.step <= 700 + 2 * monitor.window
    assert abs(alert.began - 700) <= monitor.window
    assert alert.ce_invisible
    assert ("above" if rate > 0 else "below") in str(alert)
    assert "common shift" in str(alert)


def test_a_pull_towards_the_target_is_no_alert_and_one_away_from_it_is() -> None:
    moves = {"log_z_mean": lambda step: 6 - 0.02 * max(0, step - 700)}
    towards = {"p_z_mean_raw": lambda step: 5 - 0.02 * max(0, step - 700)}
    away = {"p_z_mean_raw": lambda step: 5 + 0.02 * max(0, step - 700)}
    assert drift(AlertMonitor(pulled=True), 850, **moves, **towards) == []
    assert [alert.quantity for alert in drift(AlertMonitor(pulled=True), 850, **moves, **away)] == ["log_z_mean"]
    assert [alert.quantity for alert in drift(AlertMonitor(), 850, **moves, **towards)] == ["log_z_mean"]


def test_gradient_events_are_counted_not_averaged() -> None:
    """Every third step above 10 leaves the median where it was."""
    found = drift(AlertMonitor(), 900, grad_norm_preclip=lambda step: 30.0 if step >= 700 and step % 3 == 0 else 1.0)
    assert [alert.quantity for alert in found] == ["phi_10"]
    assert found[0].began == 702
    assert "share of steps" in str(found[0])
    rare = drift(AlertMonitor(), 900, grad_norm_preclip=lambda step: 30.0 if step % 20 == 0 else 1.0)
    assert rare == []
    always = drift(AlertMonitor(), 900, grad_norm_preclip=lambda step: 30.0 if step % 3 == 0 else 1.0)
    assert always == []


def test_second_moments_and_the_fp16_margin() -> None:
    """Sampled every tenth step, and falling."""
    monitor = AlertMonitor()
    found = []
    for step in range(1, 900):
        numbers = {"fp16_margin": 4000.0 if step < 700 else 500.0}
        if step % 10 == 0:
            numbers["adam_v_max"] = 1e-4 if step < 700 else 2e-3
        found += monitor.observe(step, numbers)
    assert sorted(alert.quantity for alert in found) == ["adam_v_max", "fp16_margin"]
    assert all(700 <= alert.began <= alert.step <= 800 for alert in found)


def test_after_it_came_back_a_second_change_is_reported_again() -> None:
    def twice(step: int) -> float:
        return 4.0 if 1000 <= step < 1400 or step >= 2500 else 1.0

    found = run(AlertMonitor(), range(1, 3000), shift=twice)
    assert [alert.quantity for alert in found] == ["mu_abs_p99", "mu_abs_p99"]


def test_a_resumed_monitor_goes_on() -> None:
    first = AlertMonitor()
    assert run(first, range(1, 1010), shift=grown) == []
    second = AlertMonitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run(second, range(1010, 1100), shift=grown) == run(first, range(1010, 1100), shift=grown) != []


def test_nonfinite_is_reported_at_once_and_once() -> None:
    monitor = AlertMonitor()
    (alert,) = monitor.observe(1, {"ce": math.nan, "gain_p99": 1.0})
    assert "not finite: ce" in str(alert)
    assert monitor.observe(2, {"ce": math.inf}) == []
    assert monitor.observe(3, {"ce": 1.0}) == []
    assert len(monitor.observe(4, {"ce": math.nan})) == 1


def test_what_is_done_with_an_alert(caplog: pytest.LogCaptureFixture) -> None:
    alert = Alert("gain_p99", "the gain", 9, 7, 4.0, 2.0, False)
    alert_action("log")(alert)
    assert "since step 7" in caplog.text
    with pytest.raises(TrainingAlertError, match="2 times"):
        alert_action("raise")(alert)
    got: list[Alert] = []
    alert_action(got.append)(alert)
    assert got == [alert]
    with pytest.raises(InputError, match="on_alert"):
        alert_action("shout")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lag"):
        AlertMonitor(window=10, lag=5)


def test_a_folder_named_wandb_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without W&B the folder of an earlier run is imported as a package, which has no `run`."""
    (tmp_path / "wandb").mkdir()
    spec = PathFinder.find_spec("wandb", [str(tmp_path)])
    assert spec is not None
    monkeypatch.setitem(sys.modules, "wandb", module_from_spec(spec))
    alert_action("log")(Alert("gain_p99", "the gain", 9, 7, 4.0, 2.0, False))


def test_levels_are_a_state() -> None:
    assert exceeded_levels({"mu_abs_p99": 12.0, "gain_p99": 3.0}, vocab=49152) == {
        "mu_abs_p99": (12.0, pytest.approx(math.log(49152)))
    }
    assert exceeded_levels({}, vocab=10) == {}
