"""The job of a process: what its environment says, and errors in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import forked_ranks
from tests.train.tiny_run import tiny_config
from zloss.distributed import StoppedError, open_job
from zloss.errors import InputError, OutputError
from zloss.results.step_record import StepRecord
from zloss.train.folder.step_log import StepLog
from zloss.train.run import run_training_of
from zloss.train.start.run_start import prepare_start


@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", "1e300"])
def test_a_timeout_that_cannot_be_used_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ZLOSS_RANK_TIMEOUT=soon` was a traceback of `float`."""
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("ZLOSS_RANK_TIMEOUT", value)):
        monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match="ZLOSS_RANK_TIMEOUT is expected to be a number of seconds"), open_job():
        pass


def test_after_a_step_all_ranks_do_the_same(tmp_path: Path) -> None:
    """An error of the first rank between two steps was a TypeError on the others."""

    def answers() -> None:
        told = []
        with open_job() as job:

            def failing(on: int) -> str | None:
                if job.rank == on:
                    raise OutputError(f"the disk of rank {on} is full.")
                return None

            def interrupted(on: int) -> None:
                if job.rank == on:
                    raise KeyboardInterrupt

            for work, release in (
                (lambda: f"reason of rank {job.rank}", lambda: None),
                (lambda: None, lambda: None),
                (lambda: f"reason of rank {job.rank}", lambda: interrupted(1)),
                (lambda: failing(0), lambda: None),
                (lambda: failing(1), lambda: interrupted(0)),
            ):
                try:
                    told.append(job.between_steps(work, release))
                except (Exception, KeyboardInterrupt) as error:
                    told.append(f"{type(error).__name__}: {error}")
            every = job.all_gather(told)
        if job.first:
            print(json.dumps(every))

    first, second = json.loads(forked_ranks(2, answers))
    assert first == [
        "reason of rank 0",
        None,
        "KeyboardInterrupt: ",
        "OutputError: the disk of rank 0 is full.",
        "ZlossError: rank 1 of 2: the disk of rank 1 is full.",
    ]
    assert second == [
        "reason of rank 0",
        None,
        "KeyboardInterrupt: ",
        *["StoppedError: another rank has reported an error."] * 2,
    ]


def test_a_full_disk_of_the_first_rank_ends_the_run_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path)
    start = prepare_start(config)
    own = StepLog.append

    def full(log: StepLog, record: StepRecord) -> None:
        if record.step == 3:
            raise OutputError("cannot write steps.jsonl: No space left on device.")
        own(log, record)

    monkeypatch.setattr(StepLog, "append", full)

    def train() -> None:
        told = ""
        with open_job() as job:
            try:
                run_training_of(job, config, start, tmp_path / "run")
            except (OutputError, StoppedError) as error:
                told = f"{type(error).__name__}: {error}"
            every = job.all_gather(told)
        if job.first:
            print(json.dumps(every))

    assert json.loads(forked_ranks(2, train)) == [
        "OutputError: cannot write steps.jsonl: No space left on device.",
        "StoppedError: another rank has reported an error.",
    ]
