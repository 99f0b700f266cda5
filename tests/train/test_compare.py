"""Curves of comparison.json against the step records they come from."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.made_metrics import metrics_of
from zloss.results.comparison import Curve
from zloss.results.steps import StepRecord
from zloss.train import compare
from zloss.train.finished import FinishedRun
from zloss.train.folder import append_step, read_steps

STEPS = 7


def record(step: int, ce: float, norm: float, tail: float | None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=ce,
        cross_entropy=ce,
        auxiliary=0.0,
        grad_norm=norm,
        grad_inf=norm,
        param_norm=1.0,
        postclip_norm=norm,
        postclip_inf=norm,
        telemetry={"p_z_999": tail},
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[FinishedRun]:
    """Two seeds of one method, their steps in files."""
    made = []
    for seed in (1, 2):
        folder = tmp_path / f"s{seed}"
        folder.mkdir()
        for step in range(1, STEPS + 1):
            tail = None if step == 3 else 2.0
            append_step(folder, record(step, ce=10.0 * seed + step, norm=float(seed * step), tail=tail))
        metrics = metrics_of(read_steps(folder), seed=seed)
        made.append(FinishedRun(folder, {"method": "ce", "coef": 0.0, "seed": seed}, metrics))
    return made


def test_seeds_are_averaged_and_steps_joined(runs: list[FinishedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "POINTS", 3)
    (group,) = compare.training_curves(runs)
    assert group.name == "ce"
    by_step = [15.0 + step for step in range(1, STEPS + 1)]
    want = [statistics.fmean(by_step[0:3]), statistics.fmean(by_step[3:6]), by_step[6]]
    assert group.curves["cross_entropy"] == Curve((3, 6, 7), tuple(want))
    assert group.curves["p_z_999"].value == (2.0, 2.0, 2.0)  # a step without the number is left out of its mean


def test_a_config_that_does_not_say_how_a_step_is_made_may_depend_on_its_seed(runs: list[FinishedRun]) -> None:
    whole = {"micro_batch": 2, "accumulate": 2, "data": {"train": {"blocks": 4}}}
    some = [{}, {"data": None}, {"data": {"train": None}}, {"micro_batch": None}, {"data": {"train": {"blocks": 0}}}]
    configs = [runs[0].config, *({**runs[0].config, **whole, **change} for change in some)]
    found = [replace(runs[0], config=config).seed_matters for config in configs]
    assert found == [True, False, True, True, True, True]


def test_the_norm_tail_is_the_share_of_steps_at_or_above(runs: list[FinishedRun]) -> None:
    (group,) = compare.training_curves(runs)
    norms = [seed * step for seed in (1, 2) for step in range(1, STEPS + 1)]
    tail = group.norm_tail
    assert list(tail.norm) == sorted(norms)
    assert tail.share[0] == 1.0
    assert tail.share[-1] == pytest.approx(1 / len(norms))  # the largest norm stands alone
