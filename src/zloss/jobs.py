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
_Report = tuple[str, bool] | None


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
    with _sigterm_as_error(job), job._lost_ranks_as_errors():
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

    def gather(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order on the first rank; an empty list on the others."""
        if self.ranks == 1:
            return [payload]
        received: list[Any] | None = [None] * self.ranks if self.first else None
        with self._lost_ranks_as_errors():
            dist.gather_object(payload, received)
        return received or []

    def from_rank(self, rank: int, payload: T | None) -> T | None:
        """The payload of `rank` on the first rank; None on the others. Only these two take part."""
        if rank == 0 or self.rank not in (0, rank):
            return payload if self.first else None
        carried: list[Any] = [payload]
        with self._lost_ranks_as_errors():
            if self.first:
                dist.recv_object_list(carried, src=rank, device=torch.device("cpu"))
                received: T | None = carried[0]
                return received
            dist.send_object_list(carried, dst=0, device=torch.device("cpu"))
        return None

    def all_gather(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order, on every rank."""
        if self.ranks == 1:
            return [payload]
        received: list[Any] = [None] * self.ranks
        with self._lost_ranks_as_errors():
            dist.all_gather_object(received, payload)
        return received

    def together(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """`make(...)` on every rank. If it fails on one, it fails on all of them, and the first rank has the error.

        Ctrl-C on one rank interrupts all of them.
        """
        if self.ranks == 1:
            return make(*args, **keywords)
        made: list[T] = []
        failure: BaseException | None = None
        try:
            made.append(make(*args, **keywords))
        except LostRankError:
            raise  # nobody may be left to report it to
        except BaseException as error:
            failure = error
        self._raise_if_any_failed(failure, self.all_gather(_report(failure)))
        return made[0]

    def from_first(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What `make(...)` returns on the first rank, on every rank; the others do not call it."""
        made: list[Any] = self.together(lambda: [make(*args, **keywords)] if self.first else [None])
        if self.ranks > 1:
            with self._lost_ranks_as_errors():
                dist.broadcast_object_list(made)
        found: T = made[0]
        return found

    def between_steps(self, work: Callable[[], str | None], release: Callable[[], None]) -> str | None:
        """`work()` on every rank; returns on all of them what it returned on the first, a reason to end or None.

        If `work` fails on one rank, it fails on all, as in `together`. `release()` raises KeyboardInterrupt if a Ctrl-C is
        pending; if it does on one rank, all raise it, whatever the reason. One message per rank.
        """
        if self.ranks == 1:
            reason = work()
            release()
            return reason
        reason, failure, interrupted = None, None, False
        try:
            reason = work()
        except ZlossError as error:
            failure = error
        try:
            release()
        except KeyboardInterrupt:
            interrupted = True
        reports = self.all_gather((_report(failure), interrupted, reason))
        self._raise_if_any_failed(failure, [report for report, _, _ in reports])
        if any(rank_interrupted for _, rank_interrupted, _ in reports):
            raise KeyboardInterrupt
        return reports[0][2]

    def _raise_if_any_failed(self, failure: BaseException | None, reports: list[_Report]) -> None:
        """Raise the first error of any rank on the first rank; the others exit silently, unless the error is a bug of theirs."""
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        if any(interrupted for _, (_, interrupted) in failed):
            raise KeyboardInterrupt
        if failure is not None and (self.first or not isinstance(failure, ZlossError)):
            raise failure
        if not self.first:
            raise StoppedError("another rank has reported an error.") from failure
        rank, (message, _) = failed[0]
        raise ZlossError(f"rank {rank} of {self.ranks}: {message}")

    @contextmanager
    def _lost_ranks_as_errors(self) -> Iterator[None]:
        """Turn the error of a collective that lost another process into a `LostRankError` of one sentence."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZlossError) or not _lost_another_rank(error):
                raise
            reason = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0].rstrip(".:")
            raise LostRankError(
                f"rank {self.rank} of {self.ranks} lost another process of the job ({reason}): {WHAT_IS_SAVED}"
            ) from error


def _report(failure: BaseException | None) -> _Report:
    """What the other ranks learn of an error: its message, and whether it is an interruption."""
    return None if failure is None else (str(failure), isinstance(failure, KeyboardInterrupt))


def _lost_another_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because another process exited, closed its connection or did not answer in time."""
    # NCCL and the store have an exception type. gloo raises a bare RuntimeError (torch 2.13: all collectives, waiting for
    # one, and the backward pass of DDP, whose traceback has no frame of torch.distributed), which is only known by the
    # path of its source file at the beginning, "[.../third_party/gloo/...] Connection closed by peer".
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


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
