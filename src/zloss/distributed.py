"""Processes that train or measure together: the denominator of their step, their groups, their tensors and their job.

`global_normalizer` is the N that every rank divides its losses by. The functions on process groups and on the parts of
distributed tensors serve the head, the recorder and the telemetry in any training loop. `Job` is for our commands: the
processes that `torchrun` or `accelerate launch` started, or this one alone.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from zloss.errors import DtypeError, InputError, TargetRangeError, UnknownNameError, ZlossError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Gradients = Literal["averaged", "summed"]

TIMEOUT_VARIABLE = "ZLOSS_RANK_TIMEOUT"
"""Environment variable: seconds after which a rank that waits for another one gives up."""
TIMEOUT_SECONDS = 1800.0
MAX_TIMEOUT_SECONDS = 1e9
"""About 30 years, so that `timedelta` does not overflow."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable of `torchrun --max-restarts`: how often it has restarted the processes."""
LOST_RANK_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket")
"""Words in the error of a collective if another process exited, closed its connection or did not answer in time."""
WHAT_IS_SAVED = "what was finished is saved, and the same command goes on with it (an audit with `resume`)."

P = ParamSpec("P")
T = TypeVar("T")


def global_normalizer(
    tokens: Tensor | Iterable[Tensor] | int | float,
    *,
    groups: dist.ProcessGroup | Iterable[dist.ProcessGroup] | None = None,
    gradients: Gradients | int = "averaged",
    ignore_index: int = -100,
    device: torch.device | str | None = None,
) -> Tensor:
    """What to pass as `normalizer=` in every micro-batch of one optimizer step; call it once, before the first.

    The gradient of the mean over all N tokens of a step is Σ_ranks Σ_micro-batches Σ_t ∇ℓ_t / N. A rank that divides its
    sums by N contributes its term. That is right for frameworks that add the ranks' gradients; DDP and FSDP average
    them over n ranks, so each rank has to divide by N/n.

    `tokens`: the targets of all micro-batches of this rank, or the number of valid ones (or the sum of their weights) as a
    number or a 0-d tensor; 0 for a rank without a batch, which has to call it too. `groups`: one group, or several
    orthogonal ones, over which tokens are split (data, FSDP, context, sequence), never those that hold the same tokens
    (tensor, pipeline); None is the default group if one is initialised. `gradients`: "averaged" for DDP and FSDP,
    "summed", or the number by which the framework divides the summed gradients.

    >>> import torch, zloss
    >>> float(zloss.global_normalizer([torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100])]))
    3.0
    """
    world = default_group()
    split_over = ([] if world is None else [world]) if groups is None else as_groups(groups)
    count = _count(tokens, ignore_index)
    total = torch.tensor(count, dtype=torch.float64, device=device or _device(tokens))
    for group in split_over:
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    divisor = gradient_divisor(gradients, split_over)
    # A step without a valid token has a loss of 0 whatever it is divided by.
    return torch.where(total > 0, total / divisor, 1.0)


def as_groups(groups: dist.ProcessGroup | Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """One group or several as a list."""
    return [groups] if isinstance(groups, dist.ProcessGroup) else list(groups)


def gradient_divisor(gradients: Gradients | int, groups: list[dist.ProcessGroup]) -> int:
    """The number by which a framework divides the sum of the ranks' gradients."""
    if isinstance(gradients, int) and not isinstance(gradients, bool):
        if gradients < 1:
            raise InputError(f"`gradients` is expected to be a divisor ≥ 1, but got {gradients!r}.")
        return gradients
    if gradients not in ("averaged", "summed"):
        raise UnknownNameError("gradients", str(gradients), ("averaged", "summed"))
    return math.prod(group.size() for group in groups) if gradients == "averaged" else 1


def _count(tokens: Tensor | Iterable[Tensor] | int | float, ignore_index: int) -> float:
    if isinstance(tokens, int | float):
        return _checked_count(tokens)
    parts = [tokens] if isinstance(tokens, Tensor) else tokens
    return float(sum(_valid_tokens(part, ignore_index) for part in parts))


def _valid_tokens(part: Tensor, ignore_index: int) -> float:
    """Valid targets of one micro-batch; a 0-d tensor already is their count."""
    if part.dim() == 0:
        return _checked_count(part.item())
    if part.is_floating_point():
        raise DtypeError(
            f"`tokens` is expected to hold targets (integers) or one count, but got {part.dtype} {list(part.shape)}: pass the "
            "sum of the weights of the valid tokens."
        )
    valid = counted_targets("tokens", part, ignore_index)
    check_target_range("tokens", part[valid], ignore_index)
    return int(valid.sum())


def _checked_count(count: float) -> float:
    if not 0 <= count < float("inf"):
        raise InputError(f"`tokens` is expected to be a count ≥ 0, but got {count!r}.")
    return float(count)


def _device(tokens: object) -> torch.device:
    if isinstance(tokens, Tensor):
        return tokens.device
    backend = "gloo" if default_group() is None else dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def counted_targets(name: str, target: Tensor, ignore_index: int) -> Tensor:
    """Which targets count, as booleans: all but `ignore_index`. Targets are integers."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DtypeError(
            f"`{name}` is expected to hold integer class indices, but got {target.dtype}: pass `{name}.long()`."
        )
    # An unsigned tensor would compare with ignore_index modulo its range.
    return target.long() != ignore_index


def check_target_range(name: str, index: Tensor, ignore_index: int, vocab: int | None = None) -> None:
    """Reject a counted target that is not a row of the vocabulary, whose size may be unknown. Reads values."""
    if not index.numel():
        return
    low, high = int(index.min()), int(index.max())
    if low >= 0 and (vocab is None or high < vocab):
        return
    expected = "class indices start at 0" if vocab is None else f"the vocabulary has {vocab} rows (0 to {vocab - 1})"
    other = f", or pass ignore_index={low}" if low < 0 else ""
    raise TargetRangeError(
        f"`{name}` holds the index {low if low < 0 else high}, but {expected}. "
        f"Mark tokens that do not count with ignore_index={ignore_index}{other}."
    )


# Process groups


def default_group() -> dist.ProcessGroup | None:
    """The group of all processes; None if none is initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def world_size() -> int:
    """Processes in the default group; 1 without one."""
    group = default_group()
    return 1 if group is None else group.size()


def first_rank() -> bool:
    """Whether this is the process that writes what all of them know."""
    group = default_group()
    return group is None or group.rank() == 0


def gathered(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The numbers [X] of every rank in rank order, [ranks, X]; one row without a group."""
    if group is None:
        return numbers.unsqueeze(0)
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(parts, numbers.contiguous(), group=group)
    return torch.stack(parts)


@dataclass(frozen=True)
class Shared:
    """A value that must be equal on every rank of a group."""

    value: int
    difference: str
    """The error if it differs, without the leading "the ranks of the group"."""


def exchange(local: list[int], shared: list[Shared], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """`local` of every rank, in rank order, after checking that all ranks agree on `shared`.

    A rank that disagreed would wait for a collective the others never start, or add numbers of different tokens. One
    all-gather of a few integers.
    """
    sent = torch.tensor([*local, *(fact.value for fact in shared)], dtype=torch.int64, device=device)
    table = gathered(sent, group).tolist()
    for column, fact in enumerate(shared, start=len(local)):
        if len({line[column] for line in table}) > 1:
            raise InputError(f"the ranks of the group {fact.difference}")
    return [line[: len(local)] for line in table]


def fingerprint(value: object) -> int:
    """CRC-32 of `repr(value)`; collisions have probability 2⁻³²."""
    return zlib.crc32(repr(value).encode())


def tokens_fingerprint(index: Tensor) -> int:
    """A number that depends on every entry of an integer tensor and on its position."""
    flat = index.reshape(-1).to(torch.int64)
    positions = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.int64)
    return int(((flat + 1) * (positions * 2654435761 % 2147483647)).sum())


# Local parts of distributed tensors


@dataclass(frozen=True)
class LocalParts:
    """The local parts of tensors that are held by equally many ranks.

    An entry that k ranks hold counts `share` = 1/k on each of them, so that a sum over all ranks counts it once: along an
    axis of a device mesh with Replicate(), for a plain parameter under DDP, for both under HSDP or FSDP2 with tensor
    parallelism. No tensor is gathered.
    """

    share: float
    tensors: list[Tensor]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; does not load the module of DTensors, which is slow to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The entries on this rank, in the storage of the tensor."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = tensor.to_local()
    return local.detach()


def share_of(tensor: Tensor, ranks: int) -> float:
    """1/k for a tensor whose entries are held by k of `ranks` ranks."""
    if not is_dtensor(tensor):
        return 1 / ranks
    shards = 1
    for axis, place in enumerate(tensor.placements):
        if place.is_partial():
            raise InputError("a parameter or gradient is a DTensor with Partial() placements: sum it over ranks first.")
        shards *= tensor.device_mesh.size(axis) if place.is_shard() else 1
    return shards / ranks


def local_parts(tensors: Iterable[Tensor], shares: Iterable[float]) -> list[LocalParts]:
    """The local parts of tensors, grouped by their `shares`."""
    by_share: dict[float, list[Tensor]] = {}
    for tensor, share in zip(tensors, shares, strict=True):
        by_share.setdefault(share, []).append(local_part(tensor))
    return [LocalParts(share, parts) for share, parts in sorted(by_share.items())]


def group_of(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group` if specified, else that of all ranks if a tensor is a DTensor; None on one process and under plain DDP, where
    every rank holds all entries."""
    if group is None and any(is_dtensor(tensor) for tensor in tensors):
        return dist.group.WORLD
    return group


# Jobs under a launcher


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

    def all_gather(self, payload: T) -> list[T]:
        """The payloads of all ranks in rank order, on every rank."""
        if self.ranks == 1:
            return [payload]
        received: list[Any] = [None] * self.ranks
        with self._lost_ranks_as_errors():
            dist.all_gather_object(received, payload)
        return received

    def together(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """`make(...)` on every rank. If it fails on one, it fails on all of them, and the first rank has the error."""
        if self.ranks == 1:
            return make(*args, **keywords)
        made: list[T] = []
        failure: ZlossError | None = None
        try:
            made.append(make(*args, **keywords))
        except ZlossError as error:
            failure = error
        self._raise_if_any_failed(failure, self.all_gather(None if failure is None else str(failure)))
        return made[0]

    def from_first(self, make: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """What `make(...)` returns on the first rank, on every rank; the others do not call it."""
        made = self.together(lambda: [make(*args, **keywords)] if self.first else [])
        return self.all_gather(made)[0][0]

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
        reports = self.all_gather((None if failure is None else str(failure), interrupted, reason))
        self._raise_if_any_failed(failure, [message for message, _, _ in reports])
        if any(rank_interrupted for _, rank_interrupted, _ in reports):
            raise KeyboardInterrupt
        return reports[0][2]

    def _raise_if_any_failed(self, failure: ZlossError | None, messages: list[str | None]) -> None:
        """Raise the first error of any rank on the first rank; the others exit silently."""
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if not failed:
            return
        if not self.first:
            raise StoppedError("another rank has reported an error.") from failure
        raise failure or ZlossError(f"rank {failed[0]} of {self.ranks}: {messages[failed[0]]}")

    @contextmanager
    def _lost_ranks_as_errors(self) -> Iterator[None]:
        """Turn the error of a collective that lost another process into a `LostRankError` of one sentence."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZlossError) or not _is_from_a_lost_rank(error):
                raise
            reason = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". ")[0].rstrip(".:")
            raise LostRankError(
                f"rank {self.rank} of {self.ranks} lost another process of the job ({reason}): {WHAT_IS_SAVED}"
            ) from error


def _is_from_a_lost_rank(error: RuntimeError) -> bool:
    message = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in message for word in LOST_RANK_WORDS)


@contextmanager
def _sigterm_as_error(job: Job) -> Iterator[None]:
    """When one process fails, a launcher ends the others with SIGTERM: that too leaves the block as a `LostRankError`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise LostRankError(
            f"rank {job.rank} of {job.ranks} was ended by the launcher, because another process of the job failed or the "
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
