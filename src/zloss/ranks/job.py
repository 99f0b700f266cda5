"""The processes of one job: those that `torchrun` or `accelerate launch` started, or this one alone."""

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
MOST_SECONDS = 1e9
"""Thirty years, which a `timedelta` holds."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable of `torchrun --max-restarts`: how often it has started the processes anew."""
LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket")
"""Words of a collective's error where another process ended, closed its connection or did not answer in time."""

P = ParamSpec("P")
T = TypeVar("T")


class LostRankError(ZlossError, RuntimeError):
    """Another process of the job ended, or did not answer in time."""


class StoppedError(ZlossError):
    """Another rank reports the error that ends the job; this one has nothing to add."""


@dataclass(frozen=True)
class _AfterStep:
    """What a rank tells the others after a step."""

    failure: str | None
    """Its error in one sentence."""
    interrupted: bool
    """Whether Ctrl-C is held."""
    reason: str | None
    """Why the run ends here."""


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
        """Whether the launcher has started the processes anew after one of them failed."""
        return self.ranks > 1 and os.environ.get(RESTARTS_VARIABLE, "0") not in ("", "0")

    def own_range(self, count: int, batch: int) -> range:
        """The own ones of `count` blocks: contiguous, every block on one rank, cut between batches of `batch`."""
        batches = -(-count // batch)
        cuts = [min(count, batch * (batches * rank // self.ranks)) for rank in range(self.ranks + 1)]
        return range(cuts[self.rank], cuts[self.rank + 1])

    def gather(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order on the first rank; nothing on the others."""
        if self.ranks == 1:
            return [payload]
        received: list[Any] | None = [None] * self.ranks if self.first else None
        with self._lost_ranks_named():
            dist.gather_object(payload, received)
        return received or []

    def everyone(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order, on every rank."""
        if self.ranks == 1:
            return [payload]
        received: list[Any] = [None] * self.ranks
        with self._lost_ranks_named():
            dist.all_gather_object(received, payload)
        return received

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None for one process."""
        return dist.group.WORLD if self.ranks > 1 else None

    def between_steps(self, work: Callable[[], str | None], release: Callable[[], None]) -> str | None:
        """`work()` on every rank; what it returns on the first one, a reason to end or None, on all of them.

        Where `work` fails on one rank, it fails on all, as in `together`. Where Ctrl-C is held on one, which `release()`
        answers with KeyboardInterrupt, all raise it, whatever the reason. One message per rank tells all of it.
        """
        if self.ranks == 1:
            reason = work()
            release()
            return reason
        reason, failure, held = None, None, False
        try:
            reason = work()
        except ZlossError as error:
            failure = error
        try:
            release()
        except KeyboardInterrupt:
            held = True
        told = self.everyone(_AfterStep(None if failure is None else str(failure), held, reason))
        self._raise_where_failed(failure, [one.failure for one in told])
        if any(one.interrupted for one in told):
            raise KeyboardInterrupt
        return told[0].reason

    def together(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """`make(...)` on every rank. Where it fails on one, it fails on all of them, and the first rank has the error."""
        if self.ranks == 1:
            return make(*args, **keywords)
        made: list[T] = []
        failure: ZlossError | None = None
        try:
            made.append(make(*args, **keywords))
        except ZlossError as error:
            failure = error
        self._raise_where_failed(failure, self.everyone(None if failure is None else str(failure)))
        return made[0]

    def _raise_where_failed(self, failure: ZlossError | None, told: list[str | None]) -> None:
        """The error of the first rank that has one on the first rank; the others end without words."""
        failed = [rank for rank, sentence in enumerate(told) if sentence is not None]
        if not failed:
            return
        if not self.first:
            raise StoppedError("another rank has reported an error.") from failure
        raise failure or ZlossError(f"rank {failed[0]} of {self.ranks}: {told[failed[0]]}")

    def from_first(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What `make(...)` returns on the first rank, on every rank; the others do not call it."""
        made = self.together(lambda: [make(*args, **keywords)] if self.first else [])
        return self.everyone(made)[0][0]

    @contextmanager
    def _lost_ranks_named(self) -> Iterator[None]:
        """A collective that failed because another process is gone says so in one sentence."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZlossError) or not _of_a_lost_rank(error):
                raise
            reason = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0].rstrip(".:")
            raise LostRankError(
                f"rank {self.rank} of {self.ranks} lost another process of the job ({reason}): {GO_ON}"
            ) from error


GO_ON = "what was finished is saved, and the same command goes on with it (an audit with `resume`)."


@contextmanager
def open_job() -> Iterator[Job]:
    """The job of this process: its group is opened here where a launcher started several processes.

    An error of a collective inside the block that comes from a lost process leaves it as a `LostRankError`.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or "RANK" not in os.environ:
        yield Job()
        return
    opened = not dist.is_initialized()
    job = Job(int(os.environ["RANK"]), ranks)
    with _ended_by_launcher(job), job._lost_ranks_named():
        if opened:
            _open_group(job)
        yield job
    # After an error the group is left to the end of the process: to take it down may wait for the rank that is gone.
    if opened:
        dist.destroy_process_group()


def _open_group(job: Job) -> None:
    timeout = timedelta(seconds=_timeout_seconds())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # torchrun keeps its store when it starts the processes anew, with the addresses of those that are gone in it.
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    fresh = PrefixStore(f"zloss/{os.environ.get(RESTARTS_VARIABLE, '0')}", store)
    dist.init_process_group(backend, store=fresh, rank=job.rank, world_size=job.ranks, timeout=timeout)


def _timeout_seconds() -> float:
    given = os.environ.get(TIMEOUT_VARIABLE)
    try:
        seconds = TIMEOUT_SECONDS if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < MOST_SECONDS:
        raise InputError(f"{TIMEOUT_VARIABLE} is expected to be a number of seconds above 0, but got {given!r}.")
    return seconds


def leave(code: int) -> NoReturn:
    """End this process of a job at once: threads of DDP may outlive their group, and then abort an orderly exit now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _ended_by_launcher(job: Job) -> Iterator[None]:
    """A launcher ends the other processes with SIGTERM where one has failed: that too leaves the block as an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise LostRankError(
            f"rank {job.rank} of {job.ranks} was ended by the launcher, because another process of the job failed or the "
            f"job was cancelled: {GO_ON}"
        )

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _of_a_lost_rank(error: RuntimeError) -> bool:
    told = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in told for word in LOST)
