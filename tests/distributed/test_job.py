"""The job of a process: what its environment says, and errors in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.forked import forked_ranks
from tests.train.tiny_run import tiny_config
from zloss.errors import InputError, OutputError
from zloss.jobs import LostRankError, StoppedError, open_job
from zloss.results.steps import StepRecord
from zloss.train import run as training
from zloss.train.run import run_training_of
from zloss.train.start import prepare_start


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
    own = training.append_step

    def full(folder: Path, record: StepRecord) -> None:
        if record.step == 3:
            raise OutputError("cannot write steps.jsonl: No space left on device.")
        own(folder, record)

    monkeypatch.setattr(training, "append_step", full)

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


@pytest.mark.parametrize("kind", ["objects", "wait", "backward"])
def test_a_rank_that_is_gone_is_named_wherever_the_others_wait_for_it(kind: str) -> None:
    """gloo has no exception type of its own, and in the backward pass of DDP no frame of torch.distributed is on the stack."""

    def meet() -> None:
        told = "nothing was raised"
        try:
            with open_job() as job:
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
                job.all_gather(job.rank)
                if job.rank == 1:
                    os._exit(0)
                if kind == "objects":
                    job.all_gather(job.rank)
                elif kind == "wait":
                    torch.distributed.all_reduce(torch.ones(3), async_op=True).wait()
                else:
                    model(torch.ones(2, 3)).sum().backward()
        except LostRankError as error:
            told = str(error)
        print(told)

    assert forked_ranks(2, meet).startswith("rank 0 of 2 lost another process of the job (")


def test_another_error_in_a_job_stays_as_it_is() -> None:
    def mistyped_product() -> None:
        with open_job() as job:
            job.all_gather(job.rank)  # a rank that leaves while the other one joins is lost for it
            raise RuntimeError("expected scalar type Float but found Half, connection or not")

    def fail() -> None:
        with pytest.raises(RuntimeError, match="expected scalar type") as caught:
            mistyped_product()
        print(type(caught.value).__name__)

    assert forked_ranks(2, fail).strip() == "RuntimeError"


def test_what_fails_on_one_rank_ends_all_of_them() -> None:
    """A bug or an OSError of one rank, which is not one of our errors, left the others waiting."""

    def answers() -> None:
        heard = []
        with open_job() as job:

            def raising(error: BaseException, on: int) -> str:
                if job.rank == on:
                    raise error
                return f"rank {job.rank}"

            for call in (
                lambda: job.from_first(raising, OSError("disk full"), on=1),
                lambda: job.from_first(raising, OSError("disk full"), on=0),
                lambda: job.together(raising, OSError("disk full"), on=1),
                lambda: job.together(raising, OutputError("disk full."), on=1),
                lambda: job.from_first(raising, KeyboardInterrupt(), on=0),
                lambda: job.together(raising, KeyboardInterrupt(), on=1),
            ):
                try:
                    heard.append(call())
                except (Exception, KeyboardInterrupt) as error:
                    heard.append(f"{type(error).__name__}: {error}")
            every = job.all_gather(heard)
        if job.first:
            print(json.dumps(every))

    stopped = "StoppedError: another rank has reported an error."
    first, second = json.loads(forked_ranks(2, answers))
    assert first == [
        "rank 0",  # the others do not call it
        "OSError: disk full",
        "ZlossError: rank 1 of 2: disk full",
        "ZlossError: rank 1 of 2: disk full.",
        *["KeyboardInterrupt: "] * 2,
    ]
    assert second == ["rank 0", stopped, "OSError: disk full", stopped, *["KeyboardInterrupt: "] * 2]
