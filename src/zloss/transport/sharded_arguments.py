"""The arguments of a loss whose vocabulary is divided over ranks: what each rank holds, and what all must have alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import Shared, exchange, fingerprint, tokens_fingerprint
from zloss.errors import InputError
from zloss.ranks.distributed_tensors import local_shard, local_tokens, replicated
from zloss.ranks.token_shard import TokenShard
from zloss.ranks.vocabulary_shard import VocabularyShard
from zloss.transport.options import HeadOptions, check_vocab


@dataclass(frozen=True)
class OpenHead:
    """The tensors of a head loss as plain ones, and the group over which the vocabulary is divided, if any."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    token_weight: Tensor | None
    group: ProcessGroup | None
    tokens: TokenShard | None = None
    """Whose tokens `hidden` has, where each rank holds its own; None where they are whole on every rank."""


def open_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
    *,
    whole_tokens: bool = False,
) -> OpenHead:
    """Rows of this rank where the head is a DTensor with Shard(0); targets whole on every rank.

    Hidden states are own ones where they are sharded over the tokens along the same group, unless `whole_tokens`; else
    they are whole on every rank.
    """
    weight, group = _opened("weight", weight, 0, group)
    if bias is not None:
        bias, bias_group = local_shard("bias", bias, 0)
        if bias_group is not None and group is None:
            raise InputError("`bias` is sharded but `weight` is not: shard both along the vocabulary, or neither.")
    target_, token_weight = replicated("target", target), replicated("token_weight", token_weight)
    assert target_ is not None
    if group is not None and not whole_tokens and (own := local_tokens(hidden, group)) is not None:
        return OpenHead(own[0], weight, bias, target_, token_weight, group, own[1])
    hidden_ = replicated("hidden", hidden)
    assert hidden_ is not None
    return OpenHead(hidden_, weight, bias, target_, token_weight, group)


def open_logits(
    logits: Tensor, weight: Tensor | None, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None, ProcessGroup | None]:
    """Columns of this rank where the logits are a DTensor with Shard(-1), with the same rows of the head."""
    logits, group = _opened("logits", logits, -1, group)
    if weight is not None:
        weight, weight_group = local_shard("weight", weight, 0)
        if weight_group is not None and group is None:
            raise InputError("`weight` is sharded but `logits` are not: shard both along the vocabulary, or neither.")
    return logits, weight, group


def _opened(name: str, tensor: Tensor, dim: int, group: ProcessGroup | None) -> tuple[Tensor, ProcessGroup | None]:
    """A plain tensor with the group its vocabulary is divided over: that of a DTensor, or the one given."""
    local, own_group = local_shard(name, tensor, dim)
    if own_group is not None and group is not None:
        raise InputError(
            f"`{name}` is a sharded DTensor, whose mesh names its group, but `group` was given too: pass one of them."
        )
    return local, own_group if own_group is not None else group


def agree_on_shards(
    differentiable: Tensor,
    sharded: Tensor,
    target: Tensor,
    options: HeadOptions,
    group: ProcessGroup,
    *,
    bias: Tensor | None = None,
    first_masked: int | None = None,
    dim: int = 0,
    leading: tuple[int, ...] | None = None,
) -> tuple[VocabularyShard, bool]:
    """The rows of this rank among those of the group, and whether a row inside log Z has a bias of -inf on any rank.

    Rows are numbered in rank order. `sharded` has its rows along `dim`; `differentiable` gets a gradient, which is summed
    over ranks or not, alike on all. `first_masked` is the first own row whose bias is -inf. `leading` is the shape of the
    tokens of all ranks, where `differentiable` has own ones.
    """
    if options.backend == "dense":
        raise InputError("backend='dense' needs the whole head on one process: use 'auto', 'chunked' or 'triton'.")
    grads = (torch.is_grad_enabled(), differentiable.requires_grad, bias is None)
    leading = tuple(differentiable.shape[:-1]) if leading is None else leading
    shared = [
        Shared(int(target.numel()), "have `target` of different sizes: each rank needs the same tokens."),
        Shared(
            tokens_fingerprint(target),
            "have different values in `target`: a vocabulary-parallel head needs the same tokens on every rank. The shard "
            "of an FSDP parameter is no vocabulary shard: call the loss inside the module's forward, or pass "
            "`weight.full_tensor()`.",
        ),
        Shared(fingerprint(options), "call the loss with different options."),
        Shared(
            fingerprint((grads, str(differentiable.dtype), str(sharded.dtype), leading)),
            "differ in shape, dtype or requires_grad of the tensors of the loss.",
        ),
    ]
    never = -1
    own = [sharded.shape[dim], never if first_masked is None else first_masked]
    table = exchange(own, shared, group, sharded.device)
    rows = [line[0] for line in table]
    total = check_vocab(options.valid_vocab, sum(rows))
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    inside = [min(max(total - start, 0), count) for start, count in zip(starts, rows, strict=True)]
    rank = group.rank()
    shard = VocabularyShard(starts[rank], inside[rank], total, max(inside), group)
    return shard, any(never < line[1] < count for line, count in zip(table, inside, strict=True))
