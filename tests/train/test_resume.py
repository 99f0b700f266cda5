"""A killed run resumes bit for bit; damaged checkpoints and settings and a full disk are one sentence each."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.forked import RAISED, Ended, Forked
from tests.train.killing_view import KillingView
from tests.train.tiny_moe import COEF, SHAPE
from tests.train.tiny_run import tiny_config
from zloss.errors import InputError
from zloss.results.run_config import MoeRun, TrainConfig
from zloss.results.steps import StepRecord
from zloss.train.folder import is_finished, load_checkpoint, read_steps, refuse_other_settings
from zloss.train.live import NoView
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import prepare_start


def in_process(
    config: TrainConfig, folder: Path, *, at: int, with_signal: int = signal.SIGKILL, limit: int | None = None
) -> Ended:
    """The run in a separate process, sent a signal after step `at`; files may not grow beyond `limit` bytes."""

    def work() -> None:
        start = prepare_start(config)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        view = KillingView(at, number=with_signal)
        run_training(config, start, folder, options=RunOptions(checkpoint_every=4), view=view)

    return Forked(work).wait()


def resumed(config: TrainConfig, folder: Path) -> list[int]:
    """Run to the end and return the steps that were actually taken."""

    class Steps(NoView):
        def show(self, record: StepRecord, tokens: int) -> None:
            taken.append(record.step)

    taken: list[int] = []
    run_training(config, prepare_start(config), folder, options=RunOptions(checkpoint_every=4), view=Steps())
    return taken


def outcome(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    steps = [replace(record, seconds=None) for record in read_steps(folder)]
    return steps, json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, tuple[list[Any], dict[str, Any]]]:
    """A model with dropout, trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder, method="centered", coef=1e-3)
    run_training(config, prepare_start(config), folder / "run", options=RunOptions(checkpoint_every=4))
    return config, outcome(folder / "run")


def test_a_killed_run_resumes_bit_for_bit(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    config, wanted = whole
    killed = in_process(config, tmp_path / "run", at=7)
    assert killed.killed, killed.error
    assert len(read_steps(tmp_path / "run")) == 7
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert resumed(config, tmp_path / "run") == list(range(5, 13))
    assert outcome(tmp_path / "run") == wanted
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "mu-loss", "coef": 1.0},
        {"method": "mu-centering"},
        {"method": "centered", "coef": 1e-2, "coef_until": 6},
        {"moe": MoeRun(**SHAPE, router="active_route_sum", router_coef=COEF), "from_config": None, "model": "moe"},
    ],
    ids=["mu-loss", "mu-centering", "coef-until", "experts"],
)
def test_a_killed_run_from_scratch_resumes_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    base = replace(tiny_config(tmp_path), model="scratch", from_config="tiny", train_tokenizer=300)
    config = replace(base, **changes)
    assert resumed(config, tmp_path / "whole") == list(range(1, 13))
    assert in_process(config, tmp_path / "run", at=7).killed
    assert resumed(config, tmp_path / "run") == list(range(5, 13))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_cut_off_checkpoint_is_detected_and_the_one_before_is_used(
    whole: tuple[TrainConfig, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, wanted = whole
    killed = in_process(config, tmp_path / "run", at=10)
    assert killed.killed, killed.error
    newest = tmp_path / "run" / "checkpoints" / "step-0000008" / "optimizer.bin"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert resumed(config, tmp_path / "run")[0] == 5
    assert "step-0000008 is damaged" in capsys.readouterr().err
    assert outcome(tmp_path / "run") == wanted


def test_settings_that_were_lost_neither_lose_nor_mix_up_checkpoints(
    whole: tuple[TrainConfig, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, wanted = whole
    assert in_process(config, tmp_path / "run", at=6).killed
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run" / "checkpoints" / "step-0000004" / ".DS_Store").touch()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert resumed(config, tmp_path / "run")[0] == 5
    assert outcome(tmp_path / "run") == wanted
    assert resumed(replace(config, seed=config.seed + 1), tmp_path / "other")[0] == 1
    assert "step-0000004 is damaged or belongs to another run" in capsys.readouterr().err


def test_interrupts_keep_the_last_step(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    config, wanted = whole
    stopped = in_process(config, tmp_path / "run", at=6, with_signal=signal.SIGINT)
    assert "KeyboardInterrupt" in stopped.error
    assert resumed(config, tmp_path / "run")[0] == 7
    assert outcome(tmp_path / "run") == wanted


def test_a_full_disk_is_one_sentence(whole: tuple[TrainConfig, Any], tmp_path: Path) -> None:
    """A limit on the size of files makes every large write fail, as a full disk would."""
    config, _ = whole
    failed = in_process(config, tmp_path / "run", at=99, limit=50_000)
    assert failed.code == RAISED
    assert "OutputError: cannot write a checkpoint" in failed.error.strip().splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize("content", [None, "", '{"method": "ce", "se', "[]", '{"coef": NaN}'])
def test_a_finished_run_without_readable_settings_is_not_overwritten(tmp_path: Path, content: str | None) -> None:
    """It was overwritten by a run with other settings, and a kill in between left those settings next to the old metrics."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    refuse_other_settings(tmp_path, {})  # no metrics: the run starts over
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(InputError, match=r"contains a finished run whose settings are unknown: .*config\.json"):
        refuse_other_settings(tmp_path, {})
    assert not is_finished(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"optimizer.bin": "0"}', '{"records.jsonl": []}'])
def test_a_checkpoint_with_damaged_checksums_is_passed_over(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "checkpoints" / "step-0000004"
    place.mkdir(parents=True)
    (place / "checksums.json").write_text(content)
    assert load_checkpoint(tmp_path, accelerator=None) == []
    assert "step-0000004 is damaged" in capsys.readouterr().err
