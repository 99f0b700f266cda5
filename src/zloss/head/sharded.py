"""Heads sharded over the vocabulary, and logits sharded over tokens.

Rank r holds the rows [start, start + rows) of W and has E_r = exp(z − m_r) with its local maximum m_r. Per chunk of tokens,
with m = max_r m_r and the factor f_r = exp(m_r − m):

    S = Σ_r f_r S_r,   ‖exp(z − m)‖² = Σ_r (f_r norm_r)²,   Σ exp(z − m)(m − z) = Σ_r f_r (drop_r + S_r (m − m_r))

and log Z = m + log S. `join_row_sums` needs one MAX and one SUM over ranks of a few numbers per token, and a second MAX if the
argmax is requested. E_r is not rescaled: f_r goes into the coefficients. dW is local. dh is summed over ranks; with the
gain, which needs all of Wᵀp, E W and W[y] are summed instead. Nothing V-wide ever moves.

A vocabulary on one process is a shard with `group=None`: no collectives.

Axes: T tokens of all ranks, C tokens of a chunk, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import exchange, fingerprint, is_dtensor, tokens_fingerprint
from zloss.errors import InputError
from zloss.head.options import HeadOptions, check_vocab
from zloss.head.rows import RowSums
from zloss.objectives import Coefficients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of this rank among a vocabulary of `total` rows; `group` is None if this process holds all of them."""

    start: int
    rows: int
    """Local rows inside log Z; 0 on a rank that holds only padding, or nothing."""
    total: int
    """V: rows inside log Z on all ranks."""
    widest: int
    """The largest `rows` of any rank: chunks of tokens are sized by it, equally on all ranks."""
    group: ProcessGroup | None = None

    @property
    def whole(self) -> bool:
        return self.group is None

    def local_targets(self, index_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets as local rows (0 for those of other ranks), and which are local; None if all are."""
        if self.whole:
            return index_C, None
        local_C = (index_C >= self.start) & (index_C < self.start + self.rows)
        return torch.where(local_C, index_C - self.start, 0), local_C

    def sum_(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value

    def start_sum_(self, value: Tensor) -> Any:
        """Start the sum over ranks in place; wait for the returned handle before reading `value`."""
        assert self.group is not None
        return dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def max_(self, value: Tensor) -> Tensor:
        """The maximum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def mean(self, local_mean: Tensor) -> Tensor:
        """The mean over all rows from the mean over local rows, [X]."""
        if self.whole:
            return local_mean
        local_sum = local_mean * self.rows if self.rows else torch.zeros_like(local_mean)
        return self.sum_(local_sum) / self.total


def whole_vocabulary(rows: int) -> VocabularyShard:
    """All rows on this process."""
    return VocabularyShard(start=0, rows=rows, total=rows, widest=rows)


@dataclass(frozen=True)
class RankShare:
    """How the local E of a chunk enters the whole vocabulary: unchanged on one process."""

    factor_C: Tensor | None = None
    """f_r = exp(m_r − m), by which the local E is multiplied; None if the vocabulary is whole."""
    has_target_C: Tensor | None = None
    """Whether the target is a local row; None if all are."""

    def local(self, whole: Coefficients) -> Coefficients:
        """The coefficients of exp(z − m) and onehot(y) as those of the local E and of local targets; g stays."""
        if self.factor_C is None or self.has_target_C is None:
            return whole
        b_C = None if whole.b is None else torch.where(self.has_target_C, whole.b, 0)
        return replace(whole, a=whole.a * self.factor_C, b=b_C)

    def scaled(self, local_CD: Tensor) -> Tensor:
        """The local E W in the scale of the whole: exp(z − m) W. A rank without E adds nothing."""
        if self.factor_C is None:
            return local_CD
        factor_C1 = self.factor_C.unsqueeze(1)
        return torch.where(factor_C1 > 0, local_CD * factor_C1, 0)


def join_row_sums(
    shard: VocabularyShard, sums: RowSums, has_target_C: Tensor | None, *, drop: bool, argmax: bool
) -> tuple[RowSums, RankShare]:
    """Row sums over the whole vocabulary from those of every rank: one MAX, one SUM, and one MAX for the arg max.

    `drop`: whether to join the sum for the entropy (the Triton kernels always return it, a rank without rows only on
    request); `argmax`: whether to join the column of the largest logit.
    """
    if has_target_C is None:  # one process holds the whole vocabulary
        return sums, RankShare()
    row_max_C = shard.max_(sums.row_max_C.clone())
    # If all local logits are -inf, the local sums are NaN; such a rank contributes 0.
    present_C = ~torch.isneginf(sums.row_max_C)
    below_C = torch.where(torch.isfinite(sums.row_max_C), sums.row_max_C - row_max_C, -torch.inf)
    factor_C = below_C.exp()

    terms = {
        "target_logit_C": torch.where(has_target_C, sums.target_logit_C, 0),
        "sum_C": torch.where(present_C, sums.sum_C * factor_C, 0),
    }
    if sums.norm_C is not None:
        terms["norm_C"] = torch.where(present_C, (sums.norm_C * factor_C).square(), 0)
    if drop and sums.drop_C is not None:
        terms["drop_C"] = torch.where(factor_C > 0, factor_C * (sums.drop_C - sums.sum_C * below_C), 0)
    if sums.mean_logit_C is not None:
        terms["mean_logit_C"] = sums.mean_logit_C * shard.rows
    summed = dict(zip(terms, shard.sum_(torch.stack(list(terms.values()))).unbind(), strict=True))
    if "norm_C" in summed:
        summed["norm_C"] = summed["norm_C"].sqrt()
    if "mean_logit_C" in summed:
        summed["mean_logit_C"] = summed["mean_logit_C"] / shard.total
    max_index_C = None
    if argmax and sums.max_index_C is not None:  # the first column among the ranks that have the maximum
        here_C = sums.row_max_C == row_max_C
        last = shard.total - 1
        max_index_C = last - shard.max_(torch.where(here_C, last - shard.start - sums.max_index_C, 0))
    return RowSums(row_max_C, **summed, max_index_C=max_index_C), RankShare(factor_C, has_target_C)


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
) -> tuple[VocabularyShard, bool]:
    """The rows of this rank among those of the group, and whether a row inside log Z has a bias of -inf on any rank.

    Rows are numbered in rank order. `sharded` has its rows along `dim`; `differentiable` gets a gradient, which is summed
    over ranks on all of them or on none. `first_masked` is the first local row whose bias is -inf.
    """
    if options.backend == "dense":
        raise InputError("backend='dense' needs the whole head on one process: use 'auto', 'chunked' or 'triton'.")
    grads = (torch.is_grad_enabled(), differentiable.requires_grad, bias is None)
    kinds = (str(differentiable.dtype), str(sharded.dtype), tuple(differentiable.shape[:-1]))
    shared = {
        "disagree: `target` differs in size, but each rank needs the same tokens.": target.numel(),
        "have different values in `target`: a vocabulary-parallel head needs the same tokens on every rank. The shard "
        "of an FSDP parameter is not a vocabulary shard: call the loss inside the module's forward, or pass "
        "`weight.full_tensor()`.": tokens_fingerprint(target),
        "call the loss with different options.": _options_fingerprint(options),
        "differ in shape, dtype or requires_grad of the tensors of the loss.": fingerprint((grads, kinds)),
    }
    never = -1
    local = [sharded.shape[dim], never if first_masked is None else first_masked]
    table = exchange(local, shared, group, sharded.device)
    rows = [line[0] for line in table]
    total = check_vocab(options.valid_vocab, sum(rows))
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    inside = [min(max(total - start, 0), count) for start, count in zip(starts, rows, strict=True)]
    rank = group.rank()
    shard = VocabularyShard(starts[rank], inside[rank], total, max(inside), group)
    return shard, any(never < line[1] < count for line, count in zip(table, inside, strict=True))


def _options_fingerprint(options: HeadOptions) -> int:
    """Tensor coefficients enter only as "tensor": each rank has its own device, and reading a value would synchronize."""
    objective = options.objective
    values = {field.name: getattr(objective, field.name) for field in fields(objective)}  # type: ignore[arg-type]
    plain = {name: "tensor" if isinstance(value, Tensor) else value for name, value in values.items()}
    return fingerprint((vars(options) | {"objective": type(objective).__name__}, plain))


def local_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, ProcessGroup | None]:
    """The arguments as plain tensors: the rows of this rank where the head is a DTensor with Shard(0), all tokens."""
    if not (is_dtensor(hidden) or is_dtensor(weight) or is_dtensor(bias) or is_dtensor(target)):
        return hidden, weight, bias, target, _replicated("token_weight", token_weight), group
    weight, group = _local_shard("weight", weight, 0, group)
    if bias is not None:
        bias, bias_group = _local_shard("bias", bias, 0)
        if bias_group is not None and group is None:
            raise InputError("`bias` is sharded but `weight` is not: shard both along the vocabulary, or neither.")
    tokens = _replicated("hidden", hidden), _replicated("target", target), _replicated("token_weight", token_weight)
    return tokens[0], weight, bias, tokens[1], tokens[2], group


def local_logits(
    logits: Tensor, weight: Tensor | None, target: Tensor, token_weight: Tensor | None, group: ProcessGroup | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, ProcessGroup | None, TokenLayout | None]:
    """The arguments as plain tensors: the columns of this rank where the logits are a DTensor with Shard(-1), with the same
    rows of the head, or the tokens of this rank where they are sharded over tokens; whole targets."""
    target, token_weight = _replicated("target", target), _replicated("token_weight", token_weight)
    layout = _token_layout(logits)
    if layout is not None:
        if group is not None:
            raise InputError(
                "`logits` are a DTensor sharded over tokens, whose mesh defines the group, but `group` was also given: leave "
                "`group` out."
            )
        assert is_dtensor(logits)
        local = logits.to_local(grad_placements=layout.placements)
        return local, _replicated("weight", weight), target, token_weight, None, layout
    logits, group = _local_shard("logits", logits, -1, group)
    if weight is not None:
        weight, weight_group = _local_shard("weight", weight, 0)
        if weight_group is not None and group is None:
            raise InputError("`weight` is sharded but `logits` are not: shard both along the vocabulary, or neither.")
    return logits, weight, target, token_weight, group, None


def agree_on_tokens(target: Tensor, options: HeadOptions, group: ProcessGroup) -> None:
    """Check that every rank of a group that divides the tokens has the targets of all of them, and the same options."""
    shared = {
        "have different values in `target`: pass those of all tokens, or a DTensor.": tokens_fingerprint(target),
        "call the loss with different options.": _options_fingerprint(options),
    }
    exchange([], shared, group, target.device)


class TokenLayout(NamedTuple):
    """How logits that are a DTensor are sharded over tokens."""

    leading: torch.Size
    """Shape of the tokens of all ranks, without the vocabulary."""
    local_leading: torch.Size
    mesh: DeviceMesh
    placements: tuple[Any, ...]
    group: ProcessGroup
    """The ranks that divide the tokens."""

    def local(self, whole_T: Tensor) -> Tensor:
        """The entries of this rank's tokens, flat."""
        from torch.distributed.tensor import DTensor, Replicate

        everywhere = [Replicate()] * len(self.placements)
        whole = DTensor.from_local(whole_T.view(self.leading), self.mesh, everywhere, run_check=False)
        return whole.redistribute(placements=self.placements).to_local().reshape(-1)

    def gather(self, local_T: Tensor) -> Tensor:
        """The entries [T] of all tokens, from those of the local ones; differentiable."""
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.leading, device="meta").stride()
        local = local_T.reshape(self.local_leading)
        whole = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.leading, stride=stride
        )
        return whole.full_tensor().reshape(-1)

    def sum(self, local: Tensor) -> Tensor:
        """The sum over ranks. Each rank differentiates the whole sum, so the gradient of its term is the upstream one."""
        from torch.distributed.tensor import DTensor, Partial

        terms = [Partial() if place.is_shard() else place for place in self.placements]
        return DTensor.from_local(local, self.mesh, terms, run_check=False).full_tensor()


def _local_shard(
    name: str, tensor: Tensor, dim: int, group: ProcessGroup | None = None
) -> tuple[Tensor, ProcessGroup | None]:
    """The rows of this rank of a DTensor that is sharded along `dim`, and the group they are divided over.

    Plain tensors come back unchanged, with the explicit `group`. A replicated DTensor is a plain tensor on every rank.
    """
    if not is_dtensor(tensor):
        return tensor, group
    sharded = [axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    if not sharded:
        return tensor.to_local(), group
    axis = sharded[0]
    place: Any = tensor.placements[axis]
    if len(sharded) > 1 or not place.is_shard() or place.dim % tensor.dim() != dim % tensor.dim():
        raise InputError(
            f"`{name}` is expected to be sharded over one axis of its mesh, with Shard({dim}) there and Replicate() "
            f"elsewhere, but its placements are {tuple(tensor.placements)}: call `{name}.redistribute(...)` first."
        )
    if group is not None:
        raise InputError(
            f"`{name}` is a sharded DTensor, whose mesh defines the group, but `group` was also given: leave `group` out."
        )
    return tensor.to_local(), tensor.device_mesh.get_group(axis)


def _token_layout(tensor: Tensor) -> TokenLayout | None:
    """The layout of a DTensor [..., X] that is sharded over tokens and nothing else; None for any other tensor."""
    if not is_dtensor(tensor):
        return None
    sharded = [axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(sharded) != 1 or tensor.dim() < 2:
        return None
    place: Any = tensor.placements[sharded[0]]
    if not place.is_shard() or place.dim % tensor.dim() == tensor.dim() - 1:
        return None
    group, local_leading = tensor.device_mesh.get_group(sharded[0]), tensor.to_local().shape[:-1]
    return TokenLayout(tensor.shape[:-1], local_leading, tensor.device_mesh, tensor.placements, group)


X = TypeVar("X", Tensor, Tensor | None)


def _replicated(name: str, tensor: X) -> X:
    """The whole tensor on every rank: unchanged, or gathered from a DTensor that is sharded over tokens.

    The gradient that comes back is complete on every rank, so a sharded tensor keeps its part of it.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    if any(place.is_partial() for place in tensor.placements):
        raise InputError(
            f"`{name}` is a DTensor with Partial() placements: sum it with `{name}.redistribute(...)` first."
        )
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)
