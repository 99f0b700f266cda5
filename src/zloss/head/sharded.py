"""The rows of the vocabulary that this rank holds, and the sums over all ranks that turn them into the whole.

Rank r holds the rows [start, start + rows). A vocabulary on one process is the shard of a group of one, without any
collective.

Axes: C tokens of a chunk.

[zloss.head.sharded] The tokens that this rank holds of a sequence that is sharded over a group, gathered and given back a chunk at a time.

A chunk has the next few tokens of every rank, so that all ranks give and take equally much. Its hidden states are
all-gathered, its gradients are summed over ranks and scattered to the ranks whose tokens they are: no rank holds the hidden
states of all tokens.

Axes: T tokens of all ranks, C tokens of a chunk, D width.

[zloss.head.sharded] The row statistics of a chunk over the whole vocabulary, from those of the rows that this rank holds.

Rank r has E_r = exp(z − m_r) with its own maximum m_r. With m = max_r m_r and the factor f_r = exp(m_r − m):

    S = Σ_r f_r S_r,   ‖exp(z − m)‖² = Σ_r (f_r norm_r)²,   Σ exp(z − m)(m − z) = Σ_r f_r (drop_r + S_r (m − m_r))

One MAX and one SUM over ranks of a few numbers per token. E_r itself is never rescaled: f_r goes into coefficients.

Axes: C tokens of a chunk.

[zloss.head.sharded] The arguments of a loss whose vocabulary is divided over ranks: what each rank holds, and what all must have alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
import torch
import torch.distributed as dist
from torch import Tensor
from functools import cached_property
from zloss.objectives import WeightedSource
from zloss.head.rows import RowPass, RowSums, RowWork
from torch.distributed import ProcessGroup
from zloss.errors import InputError
from zloss.ranks.agreement import Shared, exchange, fingerprint, tokens_fingerprint
from zloss.ranks.distributed_tensors import local_shard, local_tokens, replicated
from zloss.head.options import HeadOptions, check_vocab


# <<< zloss.head.sharded
@dataclass(frozen=True)
class VocabularyShard:
    """Own rows of a vocabulary of `total` rows; `group` is None where this process holds all of them."""

    start: int
    rows: int
    """Own rows inside log Z; 0 on a rank that holds only padding, or nothing."""
    total: int
    """V: rows inside log Z on all ranks."""
    widest: int
    """The largest `rows` of any rank: chunks of tokens are sized by it, alike on all ranks."""
    group: dist.ProcessGroup | None = None

    @property
    def whole(self) -> bool:
        return self.group is None

    @property
    def adds_shared_terms(self) -> bool:
        """Whether this rank adds the terms that every rank knows to a sum over ranks: the first one does."""
        return self.group is None or self.group.rank() == 0

    def own_targets(self, index_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Targets as own rows, and where they are own; 0 in place of the others. No mask where all are own."""
        if self.whole:
            return index_C, None
        own_C = (index_C >= self.start) & (index_C < self.start + self.rows)
        return torch.where(own_C, index_C - self.start, 0), own_C

    def sum_(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value

    def start_sum_(self, value: Tensor) -> Any:
        """Begin the sum over ranks in place; what is returned is waited for before `value` is read."""
        assert self.group is not None
        return dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def max_(self, value: Tensor) -> Tensor:
        """The maximum over ranks, in place."""
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value

    def mean(self, own_mean: Tensor) -> Tensor:
        """The mean over all rows from the mean over own rows, [X]."""
        if self.whole:
            return own_mean
        own_sum = own_mean * self.rows if self.rows else torch.zeros_like(own_mean)
        return self.sum_(own_sum) / self.total


def whole_vocabulary(rows: int) -> VocabularyShard:
    """All rows on this process."""
    return VocabularyShard(start=0, rows=rows, total=rows, widest=rows)


# <<< zloss.head.sharded
@dataclass(frozen=True, eq=False)
class TokenShard:
    """Own tokens among those of a group, in the chunk layout of torch along one dimension of `leading`."""

    leading: tuple[int, ...]
    """Shape of the tokens of all ranks, without the width."""
    dim: int
    group: dist.ProcessGroup
    device: torch.device

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Places of each rank's tokens in the flat [T], in their order on that rank."""
        flat = torch.arange(torch.Size(self.leading).numel(), device=self.device).view(self.leading)
        parts = flat.chunk(self.group.size(), dim=self.dim)
        missing = self.group.size() - len(parts)
        return (*(part.reshape(-1) for part in parts), *(flat.new_empty(0) for _ in range(missing)))

    @property
    def own(self) -> Tensor:
        """Places of own tokens."""
        return self.places[self.group.rank()]

    def whole(self, own_flags: Tensor) -> Tensor:
        """[T] of all tokens from a number or a flag of own tokens; one small all-gather."""
        most = max(len(place) for place in self.places)
        everyone, work = _start_gather(own_flags.to(torch.int32).unsqueeze(1), most, self.group)
        work.wait()
        found = torch.zeros(torch.Size(self.leading).numel(), dtype=own_flags.dtype, device=self.device)
        for place, values in zip(self.places, everyone.view(self.group.size(), most), strict=True):
            found[place] = values[: len(place)].to(own_flags.dtype)
        return found

    def chunks(self, longest: int) -> list[TokenChunk]:
        """Chunks of at most about `longest` tokens, at least one of every rank."""
        most = max(len(place) for place in self.places)
        step = max(1, longest // self.group.size())
        return [TokenChunk(self, start, min(step, most - start)) for start in range(0, most, step)]


@dataclass(frozen=True, eq=False)
class TokenChunk:
    """The tokens start … start + step − 1 of every rank that has so many, in rank order."""

    shard: TokenShard
    start: int
    step: int

    @cached_property
    def counts(self) -> list[int]:
        """Tokens of every rank in this chunk."""
        return [min(max(len(place) - self.start, 0), self.step) for place in self.shard.places]

    @cached_property
    def tokens_C(self) -> Tensor:
        """Places in the flat [T]."""
        return torch.cat([place[self.start : self.start + self.step] for place in self.shard.places])

    @property
    def own_rows(self) -> slice:
        """Own tokens of the chunk among all own tokens."""
        return slice(self.start, self.start + self.counts[self.shard.group.rank()])

    @property
    def own_in_chunk(self) -> slice:
        """Own tokens of the chunk among those of the chunk."""
        rank = self.shard.group.rank()
        before = sum(self.counts[:rank])
        return slice(before, before + self.counts[rank])

    @cached_property
    def _padded_rows(self) -> Tensor:
        """Where the tokens of the chunk are among ranks·step rows."""
        device = self.shard.device
        parts = [torch.arange(count, device=device) + rank * self.step for rank, count in enumerate(self.counts)]
        return torch.cat(parts)

    def start_gather(self, own_TD: Tensor) -> Gather:
        """Begin the gathering of the rows of the chunk from every rank's own."""
        everyone, work = _start_gather(own_TD[self.own_rows], self.step, self.shard.group)
        whole = len(everyone) == len(self.tokens_C)
        return Gather(work, everyone, None if whole else self._padded_rows)

    def start_scatter(self, part_CD: Tensor, out_TD: Tensor) -> Scatter:
        """Begin the sum over ranks of [C, D]; own rows of it are in `out_TD` once it was waited for."""
        group = self.shard.group
        padded = part_CD
        if len(part_CD) < group.size() * self.step:
            padded = part_CD.new_zeros(group.size() * self.step, part_CD.shape[1])
            padded[self._padded_rows] = part_CD
        own = part_CD.new_empty(self.step, part_CD.shape[1])
        work = dist.reduce_scatter_tensor(own, padded.contiguous(), group=group, async_op=True)
        return Scatter(work, own, out_TD[self.own_rows], padded)


@dataclass(frozen=True, eq=False)
class Gather:
    """Rows of all ranks that are under way."""

    work: Any
    everyone: Tensor
    rows: Tensor | None
    """Which of them are tokens; None where all are."""

    def wait(self) -> Tensor:
        """[C, D] in rank order."""
        self.work.wait()
        return self.everyone if self.rows is None else self.everyone[self.rows]


@dataclass(frozen=True, eq=False)
class Scatter:
    """A sum over ranks that is under way."""

    work: Any
    own: Tensor
    out: Tensor
    kept: Tensor
    """What is being summed; it must live until the sum is complete."""

    def wait(self) -> None:
        self.work.wait()
        self.out.copy_(self.own[: len(self.out)])


def _start_gather(own: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """[ranks·rows, X] from up to `rows` own rows of every rank, and what to wait for before it is read."""
    mine = own
    if len(own) < rows:
        mine = own.new_zeros(rows, own.shape[1])
        mine[: len(own)] = own
    everyone = own.new_empty(group.size() * rows, own.shape[1])
    return everyone, dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group, async_op=True)


# <<< zloss.head.sharded
@dataclass(frozen=True)
class JoinedRows:
    """What the whole vocabulary says of the tokens of a chunk."""

    sums: RowSums
    target_logit_C: Tensor
    mean_logit_C: Tensor | None
    factor_C: Tensor | None
    """f_r = exp(m_r − m), by which own E is multiplied; None where the vocabulary is whole."""
    own_C: Tensor | None
    """Where the target is an own row; None where all are."""

    def own_exp(self, along_exp_C: Tensor) -> Tensor:
        """A coefficient of exp(z − m) as one of own E = exp(z − m_r)."""
        return along_exp_C if self.factor_C is None else along_exp_C * self.factor_C

    def scaled_rows(self, own_CD: Tensor) -> Tensor:
        """E W of own rows in the scale of the whole: exp(z − m) W. A rank without E adds nothing."""
        if self.factor_C is None:
            return own_CD
        factor_C1 = self.factor_C.unsqueeze(1)
        return torch.where(factor_C1 > 0, own_CD * factor_C1, own_CD.new_zeros(()))

    def own_target(self, along_target_C: Tensor) -> Tensor:
        """A coefficient of onehot(y), 0 where the target is another rank's."""
        if self.own_C is None:
            return along_target_C
        return torch.where(self.own_C, along_target_C, along_target_C.new_zeros(()))

    def own_source(self, source: WeightedSource, shard: VocabularyShard) -> WeightedSource:
        """The source on own rows. Row work divides the uniform part by own rows, so it is given their share of V."""
        if shard.whole:
            return source
        target_C, uniform_C = source.along_target_C, source.along_uniform_C
        return WeightedSource(
            along_exp_C=self.own_exp(source.along_exp_C),
            along_target_C=None if target_C is None else self.own_target(target_C),
            along_uniform_C=None if uniform_C is None else uniform_C * (shard.rows / shard.total),
        )


def row_pass(
    work: RowWork, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, *, norm: bool, mean: bool, drop: bool
) -> RowPass:
    """The row work on own logits; a rank without rows has nothing to work on."""
    if buffers_BCV.shape[2]:
        return work.statistics(buffers_BCV, narrow_CV, index_C, norm=norm, mean=mean, drop=drop)
    return _empty_row_pass(buffers_BCV[0], narrow_CV, norm=norm, mean=mean, drop=drop)


def _empty_row_pass(own_CV: Tensor, narrow_CV: Tensor | None, *, norm: bool, mean: bool, drop: bool) -> RowPass:
    """The row pass of a rank without rows: no maximum, and sums of 0. `own_CV` is [C, 0]."""
    tokens = own_CV.shape[0]
    zero_C = own_CV.new_zeros(tokens)
    sums = RowSums(torch.full_like(zero_C, -torch.inf), zero_C, zero_C if norm else None, zero_C if drop else None)
    index_C = torch.zeros(tokens, dtype=torch.int64, device=own_CV.device)
    return RowPass(
        sums, zero_C, zero_C if mean else None, own_CV if narrow_CV is None else narrow_CV, own_CV, max_index_C=index_C
    )


def join_rows(shard: VocabularyShard, rows: RowPass, own_C: Tensor | None, *, drop: bool) -> JoinedRows:
    """`rows` of every rank as one; `drop` says whether the sum for the entropy is one of them."""
    sums = rows.sums
    if own_C is None:
        return JoinedRows(sums, rows.target_logit_C, rows.mean_logit_C, None, None)
    row_max_C = shard.max_(sums.row_max_C.clone())
    # A rank whose every logit is -inf has no E: its sums are NaN, and its share is 0.
    present_C = ~torch.isneginf(sums.row_max_C)
    below_C = torch.where(present_C, sums.row_max_C - row_max_C, -torch.inf)
    factor_C = below_C.exp()
    parts = [torch.where(own_C, rows.target_logit_C, 0.0), _share(sums.sum_C * factor_C, present_C)]
    if sums.norm_C is not None:
        parts.append(_share((sums.norm_C * factor_C).square(), present_C))
    if drop:
        assert sums.drop_C is not None
        parts.append(_share(factor_C * (sums.drop_C - sums.sum_C * below_C), factor_C > 0))
    if rows.mean_logit_C is not None:
        parts.append(rows.mean_logit_C * shard.rows if shard.rows else torch.zeros_like(rows.mean_logit_C))
    summed = iter(shard.sum_(torch.stack(parts)).unbind())
    target_logit_C, sum_C = next(summed), next(summed)
    joined = RowSums(
        row_max_C,
        sum_C,
        None if sums.norm_C is None else next(summed).sqrt(),
        next(summed) if drop else None,
    )
    mean_logit_C = None if rows.mean_logit_C is None else next(summed) / shard.total
    return JoinedRows(joined, target_logit_C, mean_logit_C, factor_C, own_C)


def clear_absent_rows_(rows: RowPass) -> None:
    """E of 0, and not of NaN, at the tokens for which every own logit is -inf."""
    absent_C1 = torch.isneginf(rows.sums.row_max_C).unsqueeze(1)
    rows.e_CV.masked_fill_(absent_C1, 0)


def _share(value_C: Tensor, present_C: Tensor) -> Tensor:
    return torch.where(present_C, value_C, value_C.new_zeros(()))


# <<< zloss.head.sharded
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
