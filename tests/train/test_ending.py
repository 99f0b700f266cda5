"""A rule that ends a run: at its step, at the same step again when the run is restarted, and never instead of Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.train.killing_view import KillingView
from tests.train.tiny_run import tiny_config
from zloss.results.run_config import TrainConfig
from zloss.results.run_metrics import RunMetrics
from zloss.results.steps import StepRecord
from zloss.train import run as training
from zloss.train.folder import read_steps
from zloss.train.options import RunOptions
from zloss.train.run import EndingRule, RunEndedError, run_training
from zloss.train.start import Start, prepare_start

Given = tuple[TrainConfig, Start]


def at(step: int) -> EndingRule:
    """Ends a run after `step`."""

    def rule(records: Sequence[StepRecord]) -> str | None:
        assert [record.step for record in records] == list(range(1, len(records) + 1))
        return "it is enough" if len(records) >= step else None

    return rule


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Given:
    config = tiny_config(tmp_path_factory.mktemp("model"), method="centered", coef=1e-3)
    return config, prepare_start(config)


def run(given: Given, folder: Path, rule: EndingRule | None, view: Any = None) -> RunMetrics | None:
    options = RunOptions(checkpoint_every=4)
    return run_training(*given, folder, options=options, view=view, ending=rule)


@pytest.mark.parametrize("step", [3, 4, 12])
def test_a_run_ends_at_its_step_and_there_again(start: Given, tmp_path: Path, step: int) -> None:
    for _ in range(2):
        with pytest.raises(RunEndedError, match=f"after step {step}: it is enough") as ended:
            run(start, tmp_path / "run", at(step))
        assert (ended.value.step, ended.value.reason) == (step, "it is enough")
        assert len(read_steps(tmp_path / "run")) == step
        assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize("step", [4, 6, 12])
def test_an_interrupt_in_the_step_that_ends_a_run_goes_first_and_keeps_the_step(
    start: Given, tmp_path: Path, step: int
) -> None:
    """The run used to take one more step, or all the remaining ones."""
    with pytest.raises(KeyboardInterrupt):
        run(start, tmp_path / "run", at(step), KillingView(step, number=signal.SIGINT))
    with pytest.raises(RunEndedError) as ended:
        run(start, tmp_path / "run", at(step))
    assert ended.value.step == step


def test_a_run_goes_on_without_the_rule(start: Given, tmp_path: Path) -> None:
    with pytest.raises(RunEndedError):
        run(start, tmp_path / "ended", at(6))
    ended, whole = run(start, tmp_path / "ended", None), run(start, tmp_path / "whole", None)
    assert ended.to_dict() == whole.to_dict()


def test_trackers_of_an_ended_run_are_closed(start: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []
    own = training.close_accelerator

    def close(accelerator: Any) -> None:
        closed.append(accelerator)
        own(accelerator)

    monkeypatch.setattr(training, "close_accelerator", close)
    with pytest.raises(RunEndedError):
        run(start, tmp_path / "run", at(2))
    assert len(closed) == 1
