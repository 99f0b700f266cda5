"""The job of a process: its environment variables, and errors in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.forked import forked_ranks
from tests.train.tiny_run import tiny_config
from zloss.errors import InputError, OutputError
from zloss.jobs import Job, LostRankError, open_job
from zloss.results.steps import StepRecord
from zloss.train import run as training
from zloss.train.run import run_training
from zloss.train.start import prepare_start


@pytest.mark.parametrize("value", ["soon", "0", "-5", "nan", "1e300"])
def test_a_timeout_that_cannot_be_used_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ZLOSS_RANK_TIMEOUT=soon` was a traceback of `float`."""
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("ZLOSS_RANK_TIMEOUT", value)):
        monkeypatch.setenv(name, text)
    with pytest.raises(InputError, match="ZLOSS_RANK_TIMEOUT is expected to be a number of seconds"), open_job():
        pass


STOPPED = "StoppedError: another rank has reported an error."


def outcomes(calls: Callable[[Job], list[Callable[[], object]]]) -> list[list[object]]:
    """What each call returned or raised, on each of two ranks."""

    def answers() -> None:
        results: list[object] = []
        with open_job() as job:
            for call in calls(job):
                try:
                    results.append(call())
                except (Exception, KeyboardInterrupt) as error:
                    results.append(f"{type(error).__name__}: {error}")
            every = job.all_gather(results)
        if job.first:
            print(json.dumps(every))

    found: list[list[object]] = json.loads(forked_ranks(2, answers))
    return found


def raising(job: Job, error: BaseException, on: int) -> str:
    if job.rank == on:
        raise error
    return f"rank {job.rank}"


def test_after_a_step_all_ranks_do_the_same() -> None:
    """An error of the first rank between two steps was a TypeError on the others."""

    def calls(job: Job) -> list[Callable[[], object]]:
        full = OutputError(f"the disk of rank {job.rank} is full.")
        interrupt = KeyboardInterrupt()
        pairs: list[tuple[Callable[[], str | None], Callable[[], object]]] = [
            (lambda: f"reason of rank {job.rank}", lambda: None),
            (lambda: None, lambda: None),
            (lambda: f"reason of rank {job.rank}", lambda: raising(job, interrupt, 1)),
            (lambda: raising(job, full, 0) and None, lambda: None),
            (lambda: raising(job, full, 1) and None, lambda: raising(job, interrupt, 0)),
        ]

        def after_step(work: Callable[[], str | None], release: Callable[[], object]) -> str | None:
            return job.all_gather(job.together(lambda: (work(), release())[0]))[0]

        return [partial(after_step, work, release) for work, release in pairs]

    first, second = outcomes(calls)
    assert first[:3] == second[:3] == ["reason of rank 0", None, "KeyboardInterrupt: "]
    assert first[3:] == [
        "OutputError: the disk of rank 0 is full.",
        "ZlossError: rank 1 of 2: the disk of rank 1 is full.",
    ]
    assert second[3:] == [STOPPED] * 2


def test_what_fails_on_one_rank_ends_all_of_them() -> None:
    """A bug or an OSError of one rank, which is not one of our errors, left the others waiting."""
    first, second = outcomes(
        lambda job: [
            lambda: job.from_first(raising, job, OSError("disk full"), on=1),
            lambda: job.from_first(raising, job, OSError("disk full"), on=0),
            lambda: job.together(raising, job, OSError("disk full"), on=1),
            lambda: job.together(raising, job, OutputError("disk full."), on=1),
            lambda: job.from_first(raising, job, KeyboardInterrupt(), on=0),
            lambda: job.together(raising, job, KeyboardInterrupt(), on=1),
        ]
    )
    assert first == [
        "rank 0",  # the others do not call it
        "OSError: disk full",
        "ZlossError: rank 1 of 2: disk full",
        "ZlossError: rank 1 of 2: disk full.",
        *["KeyboardInterrupt: "] * 2,
    ]
    assert second == ["rank 0", STOPPED, "OSError: disk full", STOPPED, *["KeyboardInterrupt: "] * 2]


def test_a_full_disk_of_the_first_rank_ends_the_run_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path)
    start = prepare_start(config)
    own = training.append_step

    def full(folder: Path, record: StepRecord) -> None:
        if record.step == 3:
            raise OutputError("cannot write steps.jsonl: No space left on device.")
        own(folder, record)

    monkeypatch.setattr(training, "append_step", full)

    first, second = outcomes(lambda job: [lambda: run_training(config, start, tmp_path / "run", job=job)])
    assert first == ["OutputError: cannot write steps.jsonl: No space left on device."]
    assert second == [STOPPED]


@pytest.mark.parametrize("kind", ["objects", "wait", "backward"])
def test_a_rank_that_is_gone_is_named_wherever_the_others_wait_for_it(kind: str) -> None:
    """gloo has no exception type, and in the backward pass of DDP no frame of torch.distributed is on the stack."""

    def meet() -> None:
        message = "nothing was raised"
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
            message = str(error)
        print(message)

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
