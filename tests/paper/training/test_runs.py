"""The runs of a training table: matched, interrupted, cut off and diverged ones, and their columns."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zloss.errors import InputError
from zloss.results.run_config import TrainConfig
from zloss.text import pydoc_topics
from zloss.train.compare import step_means
from zloss.train.folder import read_steps
from zloss_paper.engine.claims import OPEN, Missing
from zloss_paper.engine.inputs import CE, STANDARD
from zloss_paper.engine.recipe import Overrides
from zloss_paper.engine.workbench import Workbench
from zloss_paper.training.low_coefficient import GPT2_DIAG as TABLE
from zloss_paper.training.settings import Arm, TrainingTableConfig
from zloss_paper.training.table import column_value, draw_steps, matched_runs, run_notes, run_table, table_of


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("bench"))


def small(**changes: Any) -> TrainingTableConfig:
    """CE and Standard at the smoke scale, one seed."""
    config = TABLE.configure("smoke", Overrides())
    return replace(config, train=replace(config.train, **changes), arms=(Arm(CE), Arm(STANDARD, 1e-4)), seeds=(1,))


class StopsAfter:
    """A progress display during which somebody presses Ctrl-C after some steps of a run."""

    def __init__(self, run: str, steps: int) -> None:
        self.run, self.left = run, steps

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[StopsAfter]:
        self.counting = name == self.run
        yield self

    def advance(self, amount: int) -> None:
        if self.counting:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_resumes_and_gives_the_same_numbers(bench: Workbench, tmp_path: Path) -> None:
    config = small(steps=9)
    with pytest.raises(KeyboardInterrupt):
        matched_runs(config, Workbench(tmp_path, progress=StopsAfter("standard-0.0001-s1", 5)))
    finished = list(tmp_path.glob("runs/*/metrics.json"))
    assert len(finished) == 1
    again = Workbench(tmp_path)
    resumed = matched_runs(config, again)
    assert again.runs_trained == 1
    whole = matched_runs(config, bench)
    for arm in config.arms:
        assert resumed[arm][0].metrics == whole[arm][0].metrics
        assert [step.loss for step in read_steps(resumed[arm][0].folder)] == [
            step.loss for step in read_steps(whole[arm][0].folder)
        ]


def test_a_diverged_run_is_a_line_with_reasons(bench: Workbench) -> None:
    config = small(lr=1e30, clip=1e8)
    table = table_of(TABLE, config, matched_runs(config, bench))
    for line in table:
        assert "ppl" not in line.cells
        assert line.reasons["ppl"] == line.reasons["p_z_999"]
        assert re.fullmatch(r"seed 1 diverged: (\d+) of \1 validation predictions are not finite", line.reasons["ppl"])
    assert {claim.judge(table).verdict for claim in TABLE.claims} == {OPEN}


def test_tails_of_a_longer_run_are_those_of_its_steps(bench: Workbench) -> None:
    config = replace(small(steps=100, adam_every=10), seeds=(1, 2))
    runs = matched_runs(config, bench)
    own, ce = runs[config.arms[1]], runs[config.arms[0]]
    steps = [[json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()] for run in own]
    norms = [[step["grad_norm"] for step in one] for one in steps]
    p99 = np.mean([np.quantile(one, 0.99) for one in norms])
    assert column_value("grad_norm_p99", own, ce) == pytest.approx(p99, rel=1e-12)
    pooled = np.mean(np.concatenate(norms) > 1.0)
    assert 0 < pooled <= 1
    assert column_value("clip_rate", own, ce) == pytest.approx(pooled, rel=1e-12)
    largest = [max(step["adam"]["v_inf"] for step in one if step["adam"]) for one in steps]
    base = [max(step.adam.v_inf for step in read_steps(run.folder) if step.adam is not None) for run in ce]
    assert column_value("v_max_ratio_to_ce", own, ce) == pytest.approx(np.mean(np.divide(largest, base)), rel=1e-12)
    assert math.isclose(column_value("delta_ppl", ce, ce), 0)


def test_one_seed_has_no_standard_deviation(bench: Workbench) -> None:
    (ce,) = matched_runs(small(), bench)[Arm(CE)]
    with pytest.raises(Missing, match="two seeds"):
        column_value("ppl_std", [ce], [ce])
    with pytest.raises(Missing, match="4 steps"):
        column_value("grad_norm_p99", [ce], [ce])
    with pytest.raises(Missing, match="no auxiliary gradient"):
        column_value("c_aux", [ce], [ce])


def test_a_control_that_left_the_trajectory_is_reported(bench: Workbench) -> None:
    config = replace(small(), arms=(Arm(CE), Arm("Centered head")))
    runs = matched_runs(config, bench)
    assert any("bit for bit" in note for note in run_notes(config, runs, bench))
    other = matched_runs(small(), bench)[Arm(STANDARD, 1e-4)]
    wrong = {**runs, config.arms[1]: other}
    assert any("left the trajectory" in note for note in run_notes(config, wrong, bench))


def test_unmatched_runs_are_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    real = bench.run

    def another_lr(one: TrainConfig, base: TrainConfig | None = None) -> Any:
        return real(replace(one, lr=1e-3) if one.method == "standard" else one, base)

    monkeypatch.setattr(bench, "run", another_lr)
    with pytest.raises(InputError, match="not a matched pair: they differ in lr"):
        matched_runs(config, bench)


def test_drawn_lines_are_means_over_seeds(bench: Workbench, tmp_path: Path) -> None:
    config = replace(small(), seeds=(1, 2))
    runs = matched_runs(config, bench)[Arm(CE)]
    norms = [[record.grad_norm for record in read_steps(run.folder)] for run in runs]
    steps = [run.steps for run in runs]
    assert step_means(steps, "grad_norm") == pytest.approx(np.mean(norms, axis=0), rel=1e-12)
    assert all(math.isnan(value) for value in step_means(steps, "not recorded"))
    files = [draw_steps(tmp_path / name, {"CE": runs}) for name in ("a.svg", "b.svg")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"before clipping" in files[0].read_bytes()


def test_the_papers_path_trains_from_a_local_folder(gpt2_folder: Path, tmp_path: Path) -> None:
    """bf16 autocast with materialized logits, accumulated, as the paper profile does it; only shorter."""
    text = tmp_path / "topics.txt"
    text.write_text("\n\n".join(pydoc_topics()[:12]), encoding="utf-8")
    table = replace(
        TABLE,
        run={"steps": 3, "warmup": 1, "micro_batch": 2, "block_size": 32, "valid_blocks": 4, "gradient_blocks": 1},
        arms=(Arm(CE), Arm("Centered head")),
        seeds=(4,),
    )
    config = table.configure("paper", Overrides(models=(f"gpt2={gpt2_folder}",), texts=(str(text),)))
    assert config.deviations == ("the text is topics.txt, not WikiText-103",)
    measured = run_table(table, config, Workbench(tmp_path))
    assert [line.cells["ppl"].value > 1 for line in measured.table] == [True, True]
    runs = [read_steps(tmp_path / "runs" / run["run"]) for run in measured.details["runs"]]
    # In bf16 the control leaves the trajectory of CE, as the paper's Centered head lines do.
    assert [step.grad_norm for step in runs[0]] != [step.grad_norm for step in runs[1]]
    assert not any("bit for bit" in note for note in measured.notes)
