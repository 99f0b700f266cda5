"""The denominator N of a whole optimizer step over all ranks that split its tokens.

The gradient of the mean over all tokens of a step is Σ_ranks Σ_micro-batches Σ_t ∇ℓ_t / N. A rank that divides its own sums
by N gives its term of that sum. Frameworks that add the ranks' gradients are then right; DDP and FSDP *average* them over
n ranks, so each rank has to divide by N/n. `global_normalizer` returns what to divide by.

Every token counts once: groups are those over which tokens are split (data, FSDP, context, sequence), never those that
hold the same tokens (tensor, pipeline).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zloss.errors import DtypeError, InputError, TargetRangeError, UnknownNameError
from zloss.ranks.process_group import default_group

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

    `tokens`: the targets of all micro-batches of this rank, or the count of valid ones (or the sum of their weights) as a
    number or a 0-d tensor; 0 for a rank without a batch, which has to call it too. `groups`: one group, or several
    orthogonal ones, over which tokens are split; None is the default group where one is initialised. `gradients`:
    "averaged" for DDP and FSDP, "summed", or the number by which the framework divides the summed gradients.

    >>> import torch, zloss
    >>> float(zloss.global_normalizer([torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100])]))
    3.0
    """
    world = default_group()
    spread = ([] if world is None else [world]) if groups is None else as_groups(groups)
    count = _count(tokens, ignore_index)
    total = torch.tensor(count, dtype=torch.float64, device=device or _device(tokens))
    for group in spread:
        dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    divisor = gradient_divisor(gradients, spread)
    # A step without a valid token has a loss of 0 whatever it is divided by.
    return torch.where(total > 0, total / divisor, 1.0)


def as_groups(groups: dist.ProcessGroup | Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """One group or several as a list."""
    return [groups] if isinstance(groups, dist.ProcessGroup) else list(groups)


def _count(tokens: Tensor | Iterable[Tensor] | int | float, ignore_index: int) -> float:
    if isinstance(tokens, int | float):
        return _checked_count(tokens)
    parts = [tokens] if isinstance(tokens, Tensor) else tokens
    return float(sum(_valid_tokens(part, ignore_index) for part in parts))


def _valid_tokens(part: Tensor, ignore_index: int) -> float:
    """Valid targets of one micro-batch; a 0-d tensor is their count already."""
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


def counted_targets(name: str, target: Tensor, ignore_index: int) -> Tensor:
    """Which targets count, bool: all but `ignore_index`. Targets are integers."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DtypeError(
            f"`{name}` is expected to hold integer class indices, but got {target.dtype}: pass `{name}.long()`."
        )
    # An unsigned tensor would compare with ignore_index modulo its range.
    return target.long() != ignore_index


def check_target_range(name: str, index: Tensor, ignore_index: int, vocab: int | None = None) -> None:
    """Refuse a counted target that is not a row of the vocabulary; its size may be unknown. Reads values."""
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


def _checked_count(count: float) -> float:
    if not 0 <= count < float("inf"):
        raise InputError(f"`tokens` is expected to be a count ≥ 0, but got {count!r}.")
    return float(count)


def _device(tokens: object) -> torch.device:
    if isinstance(tokens, Tensor):
        return tokens.device
    backend = "gloo" if default_group() is None else dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def gradient_divisor(gradients: Gradients | int, groups: list[dist.ProcessGroup]) -> int:
    """By how much a framework divides the sum of the ranks' gradients."""
    if isinstance(gradients, int) and not isinstance(gradients, bool):
        if gradients < 1:
            raise InputError(f"`gradients` is expected to be a divisor ≥ 1, but got {gradients!r}.")
        return gradients
    if gradients not in ("averaged", "summed"):
        raise UnknownNameError("gradients", str(gradients), ("averaged", "summed"))
    ranks = 1
    for group in groups:
        ranks *= group.size()
    return ranks if gradients == "averaged" else 1
