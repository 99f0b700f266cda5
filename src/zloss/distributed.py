"""Ranks that train together, in any training loop: the denominator of their step, their groups, their parts of tensors.

`global_normalizer` is the N that every rank divides its losses by. The functions on process groups and on the local parts
of distributed tensors serve the head, the recorder and the telemetry.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.errors import DeviceError, DtypeError, InputError, TargetRangeError, UnknownNameError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Gradients = Literal["averaged", "summed"]


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
    them over n ranks, so each rank must divide by N/n.

    `tokens`: the targets of all micro-batches of this rank, or the number of valid ones (or the sum of their weights) as a
    number or a 0-d tensor; 0 for a rank without a batch, which must call it too. `groups`: one group, or several
    orthogonal ones, over which tokens are split (data, FSDP, context, sequence), never those that hold the same tokens
    (tensor, pipeline); None is the default group if one is initialized. `gradients`: "averaged" for DDP and FSDP,
    "summed", or the number by which the framework divides the summed gradients.

    >>> import torch, zloss
    >>> float(zloss.global_normalizer([torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100])]))
    3.0
    """
    world = default_group()
    split_over = ([] if world is None else [world]) if groups is None else as_groups(groups)
    several = isinstance(tokens, Iterable) and not isinstance(tokens, Tensor | str | bytes)
    parts = cast(Iterable[Any], tokens) if several else [tokens]
    count = float(sum(_valid_tokens(part, ignore_index) for part in parts))
    total = torch.tensor(count, dtype=torch.float64, device=device or _device(tokens))
    for group in split_over:
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    divisor = gradient_divisor(gradients, split_over)
    # A step without a valid token has a loss of 0 whatever it is divided by.
    return torch.where(total > 0, total / divisor, 1.0)


def as_groups(groups: dist.ProcessGroup | Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """One group or several as a list."""
    found = list(groups) if isinstance(groups, Iterable) else [groups]
    for group in found:
        if not isinstance(group, dist.ProcessGroup):
            raise DtypeError(
                f"`groups` is expected to be one process group or several, but got {type(group).__name__}: pass those of a "
                "DeviceMesh as `mesh.get_group(...)`."
            )
    return found


def gradient_divisor(gradients: Gradients | int, groups: list[dist.ProcessGroup]) -> int:
    """The number by which a framework divides the sum of the ranks' gradients."""
    if isinstance(gradients, int) and not isinstance(gradients, bool):
        if gradients < 1:
            raise InputError(f"`gradients` is expected to be a divisor ≥ 1, but got {gradients!r}.")
        return gradients
    if gradients not in ("averaged", "summed"):
        raise UnknownNameError("gradients", str(gradients), ("averaged", "summed"))
    return math.prod(group.size() for group in groups) if gradients == "averaged" else 1


def _valid_tokens(part: Any, ignore_index: int) -> float:
    """Valid targets of one micro-batch; a number or a 0-d tensor already is their count."""
    if isinstance(part, Tensor) and part.is_meta:
        raise DeviceError("`tokens` is on the meta device, which holds no values: move it to a real device.")
    if not isinstance(part, Tensor) or part.dim() == 0:
        count = part.item() if isinstance(part, Tensor) else part
        if isinstance(count, bool) or not isinstance(count, int | float):
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise DtypeError(f"`tokens` is expected to hold targets (integer tensors) or one count, but got {got}.")
        if not 0 <= count <= sys.float_info.max:
            raise InputError(f"`tokens` is expected to be a count ≥ 0, but got {count!r}.")
        return float(count)
    if part.is_floating_point():
        raise DtypeError(
            f"`tokens` is expected to hold targets (integers) or one count, but got {part.dtype} {list(part.shape)}: pass the "
            "sum of the weights of the valid tokens."
        )
    check_integers("tokens", part)
    # An unsigned tensor would compare with ignore_index modulo its range.
    valid = part.long() != ignore_index
    check_target_range("tokens", part[valid], ignore_index)
    return int(valid.sum())


def _device(tokens: object) -> torch.device:
    if isinstance(tokens, Tensor):
        return tokens.device
    backend = "gloo" if default_group() is None else dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def check_integers(name: str, target: Tensor) -> None:
    """Targets are class indices."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DtypeError(
            f"`{name}` is expected to hold integer class indices, but got {target.dtype}: pass `{name}.long()`."
        )


def check_target_range(name: str, index: Tensor, ignore_index: int, vocab: int | None = None) -> None:
    """Reject a target that counts but is outside the vocabulary; `vocab=None` if its size is unknown. Reads values."""
    if not index.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
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
    """The group of all processes; None if none is initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def world_size() -> int:
    """Processes in the default group; 1 without one."""
    group = default_group()
    return 1 if group is None else group.size()


def first_rank() -> bool:
    """True on the one process that writes shared output."""
    group = default_group()
    return group is None or group.rank() == 0


def gathered(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The numbers [X] of every rank in rank order, [ranks, X]; one row without a group."""
    if group is None:
        return numbers.unsqueeze(0)
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(parts, numbers.contiguous(), group=group)
    return torch.stack(parts)


def exchange(
    local: list[int], shared: dict[str, int], group: dist.ProcessGroup, device: torch.device
) -> list[list[int]]:
    """`local` of every rank, in rank order, after checking that all ranks agree on the numbers in `shared`, whose keys
    complete the error message "the ranks of the group …".

    A rank that disagreed would wait for a collective the others never start, or add numbers of different tokens. One
    all-gather of a few integers.
    """
    sent = torch.tensor([*local, *shared.values()], dtype=torch.int64, device=device)
    table = gathered(sent, group).tolist()
    for column, difference in enumerate(shared, start=len(local)):
        if len({line[column] for line in table}) > 1:
            raise InputError(f"the ranks of the group {difference}")
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
    """1/k for a tensor whose entries are held by k of `ranks` ranks, so that a sum over all ranks counts an entry once.

    Entries are held by several ranks along an axis of a device mesh with Replicate(), for a plain parameter under DDP, and for
    both under HSDP or FSDP2 with tensor parallelism. No tensor is gathered.
    """
    if not is_dtensor(tensor):
        return 1 / ranks
    shards = 1
    for axis, place in enumerate(tensor.placements):
        if place.is_partial():
            raise InputError("a parameter or gradient is a DTensor with Partial() placements: sum it over ranks first.")
        shards *= tensor.device_mesh.size(axis) if place.is_shard() else 1
    return shards / ranks


def group_of(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group` if specified, else that of all ranks if a tensor is a DTensor; None on one process and under plain DDP, where
    every rank holds all entries."""
    if group is None and any(is_dtensor(tensor) for tensor in tensors):
        return dist.group.WORLD
    return group
