"""The processes of one command: those that `torchrun` or `accelerate launch` started, or this one alone.

`open_job` opens their group and gives each process its `Job`, with which audits and runs divide their work, gather what
they found, and fail together: an error of one rank ends all of them, and one sentence is printed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zloss.errors import InputError, ZlossError

TIMEOUT_VARIABLE = "ZLOSS_RANK_TIMEOUT"
"""Environment variable: seconds after which a rank that waits for another one gives up."""
TIMEOUT_SECONDS = 1800.0
MAX_TIMEOUT_SECONDS = 1e9
"""About 30 years, so that `timedelta` does not overflow."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable of `torchrun --max-restarts`: how often it has restarted the processes."""
WHAT_IS_SAVED = "what was finished is saved, and the same command resumes from there (an audit with `resume`)."

P = ParamSpec("P")
T = TypeVar("T")


class LostRankError(ZlossError, RuntimeError):
    """Another process of the job exited, or did not answer in time."""


class StoppedError(ZlossError):
    """Another rank reports the error that ends the job; this one has nothing to add."""


@contextmanager
def open_job() -> Iterator[Job]:
    """The job of this process. If a launcher started several processes, their group is opened here.

    An error inside the block that comes from a lost process leaves it as a `LostRankError`.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or "RANK" not in os.environ:
        yield Job()
        return
    opened = not dist.is_initialized()
    job = Job(int(os.environ["RANK"]), ranks)
    with _sigterm_as_error(job), _lost_ranks_as_errors(job):
        if opened:
            _open_group(job)
        yield job
    # After an error the group is left to the end of the process: destroying it may wait for the rank that is gone.
    if opened:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Job:
    """This process among those of its job."""

    rank: int = 0
    ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """Whether the launcher has restarted the processes after one of them failed."""
        return self.ranks > 1 and os.environ.get(RESTARTS_VARIABLE, "0") not in ("", "0")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None for one process."""
        return dist.group.WORLD if self.ranks > 1 else None

    def local_range(self, count: int, batch: int) -> range:
        """Which of `count` blocks are for this rank: contiguous, every block on one rank, cut between batches of `batch`."""
        batches = -(-count // batch)
        cuts = [min(count, batch * (batches * rank // self.ranks)) for rank in range(self.ranks + 1)]
        return range(cuts[self.rank], cuts[self.rank + 1])

    def from_rank(self, rank: int, payload: T | None) -> T | None:
        """The payload of `rank` on the first rank; None on the others. Only these two take part."""
        if rank == 0 or self.rank not in (0, rank):
            return payload if self.first else None
        carried: list[Any] = [payload]
        if self.first:
            dist.recv_object_list(carried, src=rank, device=torch.device("cpu"))
        else:
            dist.send_object_list(carried, dst=0, device=torch.device("cpu"))
        return carried[0] if self.first else None

    def all_gather(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order, on every rank."""
        received: list[Any] = [payload] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(received, payload)
        return received

    def together(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """`make(...)` on every rank. If it fails on one, it fails on all of them, and the first rank has the error.

        Ctrl-C on one rank interrupts all of them, unless another one has an error.
        """
        if self.ranks == 1:
            return make(*args, **keywords)
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(make(*args, **keywords))
        except BaseException as error:
            if _lost_another_rank(error):
                raise  # no process may be left to report it to
            failure = error
        interrupted = isinstance(failure, KeyboardInterrupt)
        reports = self.all_gather((interrupted, None if failure is None or interrupted else str(failure)))
        failed = [(rank, message) for rank, (_, message) in enumerate(reports) if message is not None]
        if not failed:
            if any(stopped for stopped, _ in reports):
                raise KeyboardInterrupt
            return made[0]
        # The first rank reports the error of all; the others exit silently, unless the error is a bug on that rank.
        if failure is not None and not interrupted and (self.first or not isinstance(failure, ZlossError)):
            raise failure
        if not self.first:
            raise StoppedError("another rank has reported an error.") from failure
        rank, message = failed[0]
        raise ZlossError(f"rank {rank} of {self.ranks}: {message}")

    def from_first(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What `make(...)` returns on the first rank, on every rank; the others do not call it."""
        made: list[Any] = self.together(lambda: [make(*args, **keywords)] if self.first else [None])
        if self.ranks > 1:
            dist.broadcast_object_list(made)
        found: T = made[0]
        return found


def _lost_another_rank(error: BaseException) -> bool:
    """Whether another process exited, closed its connection, did not answer in time, or made the launcher end this one."""
    # NCCL and the store have an exception type. gloo raises a bare RuntimeError (torch 2.13: all collectives, waiting for
    # one, and the backward pass of DDP, whose traceback has no frame of torch.distributed), which is only known by the
    # path of its source file at the beginning, "[.../third_party/gloo/...] Connection closed by peer".
    if isinstance(error, ZlossError) or not isinstance(error, RuntimeError):
        return isinstance(error, LostRankError)
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


@contextmanager
def _lost_ranks_as_errors(job: Job) -> Iterator[None]:
    """Turn the error of a collective that lost another process into a `LostRankError` of one sentence."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ZlossError) or not _lost_another_rank(error):
            raise
        reason = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0].rstrip(".:")
        raise LostRankError(
            f"rank {job.rank} of {job.ranks} lost another process of the job ({reason}): {WHAT_IS_SAVED}"
        ) from error


@contextmanager
def _sigterm_as_error(job: Job) -> Iterator[None]:
    """When one process fails, a launcher ends the others with SIGTERM: that too leaves the block as a `LostRankError`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise LostRankError(
            f"rank {job.rank} of {job.ranks} was terminated by the launcher, because another process of the job failed or the "
            f"job was cancelled: {WHAT_IS_SAVED}"
        )

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _open_group(job: Job) -> None:
    timeout = timedelta(seconds=_timeout_seconds())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # torchrun keeps its store when it restarts the processes, with the addresses of those that are gone in it.
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    fresh = PrefixStore(f"zloss/{os.environ.get(RESTARTS_VARIABLE, '0')}", store)
    dist.init_process_group(backend, store=fresh, rank=job.rank, world_size=job.ranks, timeout=timeout)


def _timeout_seconds() -> float:
    value = os.environ.get(TIMEOUT_VARIABLE)
    try:
        seconds = TIMEOUT_SECONDS if value is None else float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < MAX_TIMEOUT_SECONDS:
        raise InputError(f"{TIMEOUT_VARIABLE} is expected to be a number of seconds above 0, but got {value!r}.")
    return seconds


def leave(code: int) -> NoReturn:
    """End this process of a job at once: threads of DDP may outlive their group and then sometimes abort an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
