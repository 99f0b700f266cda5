"""Heads whose vocabulary is divided over ranks, and hidden states whose tokens are.

Rank r holds the rows [start, start + rows) of W and has E_r = exp(z − m_r) with its local maximum m_r. Per chunk of tokens,
with m = max_r m_r and the factor f_r = exp(m_r − m):

    S = Σ_r f_r S_r,   ‖exp(z − m)‖² = Σ_r (f_r norm_r)²,   Σ exp(z − m)(m − z) = Σ_r f_r (drop_r + S_r (m − m_r))

One MAX and one SUM over ranks of a few numbers per token (`join_row_sums`). E_r itself is never rescaled: f_r goes into the
coefficients. dW is local; dh is the sum over ranks of the local E W, the same sum that gives ‖Wᵀp‖ for the gain. Nothing
V-wide ever moves.

A vocabulary on one process is the shard of a group of one, without any collective.

Axes: T tokens of all ranks, C tokens of a chunk, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import Shared, exchange, fingerprint, is_dtensor, tokens_fingerprint
from zloss.errors import InputError
from zloss.head.options import HeadOptions, check_vocab
from zloss.head.rows import RowSums
from zloss.objectives import Coefficients


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

    `drop`: whether the sum for the entropy is needed; `argmax`: whether the column of the largest logit is.
    """
    if has_target_C is None:
        return sums, RankShare()
    row_max_C = shard.max_(sums.row_max_C.clone())
    # A rank whose every logit is -inf has no E: its sums are NaN, and its share is 0.
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
    leading: tuple[int, ...] | None = None,
) -> tuple[VocabularyShard, bool]:
    """The rows of this rank among those of the group, and whether a row inside log Z has a bias of -inf on any rank.

    Rows are numbered in rank order. `sharded` has its rows along `dim`; `differentiable` gets a gradient, which is summed
    over ranks on all of them or on none. `first_masked` is the first local row whose bias is -inf. `leading` is the shape
    of the tokens of all ranks, where `differentiable` has local ones.
    """
    if options.backend == "dense":
        raise InputError("backend='dense' needs the whole head on one process: use 'auto', 'chunked' or 'triton'.")
    grads = (torch.is_grad_enabled(), differentiable.requires_grad, bias is None)
    leading = tuple(differentiable.shape[:-1]) if leading is None else leading
    shared = [
        Shared(int(target.numel()), "disagree: `target` differs in size, but each rank needs the same tokens."),
        Shared(
            tokens_fingerprint(target),
            "have different values in `target`: a vocabulary-parallel head needs the same tokens on every rank. The shard "
            "of an FSDP parameter is not a vocabulary shard: call the loss inside the module's forward, or pass "
            "`weight.full_tensor()`.",
        ),
        Shared(_options_fingerprint(options), "call the loss with different options."),
        Shared(
            fingerprint((grads, str(differentiable.dtype), str(sharded.dtype), leading)),
            "differ in shape, dtype or requires_grad of the tensors of the loss.",
        ),
    ]
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
    """Of tensor coefficients only that they are tensors: each rank has its own device, and reading a value would wait for it."""
    objective = options.objective
    values = {field.name: getattr(objective, field.name) for field in fields(objective)}  # type: ignore[arg-type]
    plain = {name: "tensor" if isinstance(value, Tensor) else value for name, value in values.items()}
    return fingerprint((vars(options) | {"objective": type(objective).__name__}, plain))


@dataclass(frozen=True, eq=False)
class TokenShard:
    """The tokens of this rank among those of a group.

    A chunk has the next few tokens of every rank, so that all ranks give and take equally much. Its hidden states are
    all-gathered, its gradients are summed over ranks and scattered to the ranks whose tokens they are: no rank holds the
    hidden states of all tokens.
    """

    leading: tuple[int, ...]
    """Shape of the tokens of all ranks, without the width."""
    places: tuple[Tensor, ...]
    """Positions of each rank's tokens in the flat [T], in their order on that rank."""
    group: ProcessGroup

    @property
    def local(self) -> Tensor:
        """Positions of the local tokens."""
        return self.places[self.group.rank()]

    def gather(self, local: Tensor) -> Tensor:
        """[T] of all tokens from a number or flag of the local ones; one small all-gather."""
        most = max(len(place) for place in self.places)
        sent = local.to(torch.int32) if local.dtype == torch.bool else local
        everyone, work = _start_gather(sent.unsqueeze(1), most, self.group)
        work.wait()
        found = local.new_zeros(torch.Size(self.leading).numel())
        for place, values in zip(self.places, everyone.view(self.group.size(), most), strict=True):
            found[place] = values[: len(place)].to(local.dtype)
        return found

    def sum_(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(value, dist.ReduceOp.SUM, group=self.group)
        return value

    def chunks(self, longest: int) -> list[TokenChunk]:
        """Chunks of at most about `longest` tokens, at least one of every rank."""
        most = max(len(place) for place in self.places)
        step = max(1, longest // self.group.size())
        return [TokenChunk(self, start, min(step, most - start)) for start in range(0, most, step)]


class TokenChunk:
    """The tokens start … start + step − 1 of every rank that has so many, in rank order."""

    def __init__(self, shard: TokenShard, start: int, step: int) -> None:
        pieces = [place[start : start + step] for place in shard.places]
        counts, rank = [len(piece) for piece in pieces], shard.group.rank()
        before = sum(counts[:rank])
        self._group, self._step = shard.group, step
        self.tokens_C = torch.cat(pieces)
        """Positions in the flat [T]."""
        self.local_rows = slice(start, start + counts[rank])
        """The local tokens of the chunk among all local tokens."""
        self.local_in_chunk = slice(before, before + counts[rank])
        """The local tokens of the chunk among those of the chunk."""
        self._padded_rows: Tensor | None = None
        """Where the tokens of the chunk are among ranks·step rows; None if they fill them."""
        if min(counts) < step:
            rows = [torch.arange(count, device=piece.device) for count, piece in zip(counts, pieces, strict=True)]
            self._padded_rows = torch.cat([row + other * step for other, row in enumerate(rows)])

    def start_gather(self, local_TD: Tensor) -> Callable[[], Tensor]:
        """Start gathering the rows of the chunk from every rank; the returned function waits for them, [C, D] in rank order."""
        everyone, work = _start_gather(local_TD[self.local_rows], self._step, self._group)

        def wait() -> Tensor:
            work.wait()
            return everyone if self._padded_rows is None else everyone[self._padded_rows]

        return wait

    def start_scatter(self, term_CD: Tensor, out_TD: Tensor) -> Callable[[], None]:
        """Start the sum over ranks of [C, D]; after the returned function its local rows are in `out_TD`."""
        padded = term_CD
        if self._padded_rows is not None:
            padded = term_CD.new_zeros(self._group.size() * self._step, term_CD.shape[1])
            padded[self._padded_rows] = term_CD
        padded = padded.contiguous()
        local = term_CD.new_empty(self._step, term_CD.shape[1])
        work = dist.reduce_scatter_tensor(local, padded, group=self._group, async_op=True)

        def wait(summed: Tensor = padded) -> None:  # what is being summed must live until the sum is complete
            work.wait()
            out_TD[self.local_rows] = local[: self.local_rows.stop - self.local_rows.start]

        return wait


def _start_gather(local: Tensor, rows: int, group: ProcessGroup) -> tuple[Tensor, Any]:
    """[ranks·rows, X] from up to `rows` rows of every rank, and the handle to wait for before reading it."""
    mine = local
    if len(local) < rows:
        mine = local.new_zeros(rows, local.shape[1])
        mine[: len(local)] = local
    everyone = local.new_empty(group.size() * rows, local.shape[1])
    return everyone, dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group, async_op=True)


Span = tuple[slice | Tensor, int, TokenChunk | None]
"""The tokens of one chunk: their positions, how many they are, and which rank has which if every rank holds some."""


def token_spans(tokens: TokenShard | None, bounds: list[tuple[int, int]]) -> list[Span]:
    """Chunks of these ranges, or, where every rank holds some of the tokens, chunks of about the same length."""
    if tokens is None or not bounds:
        return [(slice(start, stop), stop - start, None) for start, stop in bounds]
    chunks = tokens.chunks(max(stop - start for start, stop in bounds))
    return [(chunk.tokens_C, len(chunk.tokens_C), chunk) for chunk in chunks]


def at_tokens(x_T: Tensor, tokens: slice | Tensor) -> Tensor:
    """The rows of x that belong to a chunk; x itself if those are all."""
    if isinstance(tokens, slice) and tokens.start == 0 and tokens.stop == x_T.shape[0]:
        return x_T
    return x_T[tokens]


def with_hidden(spans: list[Span], local_TD: Tensor) -> Iterator[tuple[Span, Tensor]]:
    """Every span with its hidden states [C, D]. Those of other ranks are fetched during the work on the span before."""
    chunks = [chunk for _, _, chunk in spans if chunk is not None]
    following = chunks[0].start_gather(local_TD) if chunks else None
    for place, span in enumerate(spans):
        if following is None:
            yield span, at_tokens(local_TD, span[0])
            continue
        current = following
        if place + 1 < len(chunks):
            following = chunks[place + 1].start_gather(local_TD)
        yield span, current()


LocalHead = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, ProcessGroup | None, TokenShard | None]
"""(hidden, weight, bias, target, token_weight, group, token shard)."""


def local_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
    *,
    gather_tokens: bool = False,
) -> LocalHead:
    """The arguments as plain tensors: the rows of this rank where the head is a DTensor with Shard(0), whole targets.

    Hidden states stay local where they are sharded over the tokens along the same group, unless `gather_tokens`; otherwise
    they are whole on every rank.
    """
    if not any(is_dtensor(tensor) for tensor in (hidden, weight, bias, target, token_weight)):
        return hidden, weight, bias, target, token_weight, group, None
    weight, group = _local_shard("weight", weight, 0, group)
    if bias is not None:
        bias, bias_group = _local_shard("bias", bias, 0)
        if bias_group is not None and group is None:
            raise InputError("`bias` is sharded but `weight` is not: shard both along the vocabulary, or neither.")
    target = _replicated("target", target)
    token_weight = None if token_weight is None else _replicated("token_weight", token_weight)
    if group is not None and not gather_tokens and (local := _local_tokens(hidden, group)) is not None:
        return local[0], weight, bias, target, token_weight, group, local[1]
    return _replicated("hidden", hidden), weight, bias, target, token_weight, group, None


LocalLogits = tuple[Tensor, Tensor | None, Tensor, Tensor | None, ProcessGroup | None, TokenShard | None]
"""(logits, weight, target, token_weight, group, token shard)."""


def local_logits(
    logits: Tensor, weight: Tensor | None, target: Tensor, token_weight: Tensor | None, group: ProcessGroup | None
) -> LocalLogits:
    """The arguments as plain tensors: the columns of this rank where the logits are a DTensor with Shard(-1), with the same
    rows of the head, or the tokens of this rank where they are sharded over tokens; whole targets."""
    if not any(is_dtensor(tensor) for tensor in (logits, weight, target, token_weight)):
        return logits, weight, target, token_weight, group, None
    target = _replicated("target", target)
    token_weight = None if token_weight is None else _replicated("token_weight", token_weight)
    if (found := _token_shard(logits)) is not None:
        if group is not None:
            raise InputError(
                "`logits` are a DTensor sharded over tokens, whose mesh names its group, but `group` was given too."
            )
        weight = None if weight is None else _replicated("weight", weight)
        return found[0], weight, target, token_weight, None, found[1]
    logits, group = _local_shard("logits", logits, -1, group)
    if weight is not None:
        weight, weight_group = _local_shard("weight", weight, 0)
        if weight_group is not None and group is None:
            raise InputError("`weight` is sharded but `logits` are not: shard both along the vocabulary, or neither.")
    return logits, weight, target, token_weight, group, None


def agree_on_tokens(target: Tensor, options: HeadOptions, group: ProcessGroup) -> None:
    """Check that every rank of a group that divides the tokens has the targets of all of them, and the same options."""
    shared = [
        Shared(
            tokens_fingerprint(target), "have different values in `target`: pass those of all tokens, or a DTensor."
        ),
        Shared(_options_fingerprint(options), "call the loss with different options."),
    ]
    exchange([], shared, group, target.device)


class SumOverTokens(torch.autograd.Function):
    """The loss of all tokens, from that of the local ones: a sum over ranks, or one number per token in their order.

    Every rank differentiates the whole loss, so the gradient of its own part is the upstream gradient.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, tokens: TokenShard) -> Tensor:
        ctx.places = tokens.local if local.dim() else None
        return tokens.gather(local) if local.dim() else tokens.sum_(local.clone())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream if ctx.places is None else upstream[ctx.places], None


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
            f"`{name}` is a sharded DTensor, whose mesh names its group, but `group` was given too: pass one of them."
        )
    return tensor.to_local(), tensor.device_mesh.get_group(axis)


def _local_tokens(hidden: Tensor, group: ProcessGroup) -> tuple[Tensor, TokenShard] | None:
    """`_token_shard` where the tokens are divided over the ranks of `group`; None otherwise."""
    found = _token_shard(hidden)
    same = found is not None and dist.get_process_group_ranks(found[1].group) == dist.get_process_group_ranks(group)
    return found if same else None


def _token_shard(tensor: Tensor) -> tuple[Tensor, TokenShard] | None:
    """The local part of a DTensor [..., X] and which tokens it is, where it is sharded over tokens and nothing else; the
    gradient that comes back is that of the local tokens. None for any other tensor."""
    if not is_dtensor(tensor):
        return None
    sharded = [axis for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(sharded) != 1 or tensor.dim() < 2:
        return None
    place: Any = tensor.placements[sharded[0]]
    if not place.is_shard() or place.dim % tensor.dim() == tensor.dim() - 1:
        return None
    group = tensor.device_mesh.get_group(sharded[0])
    local = tensor.to_local(grad_placements=tensor.placements)
    # The chunk layout of torch, in which ranks at the end may hold nothing.
    leading = tuple(tensor.shape[:-1])
    flat = torch.arange(torch.Size(leading).numel(), device=local.device)
    pieces = flat.view(leading).chunk(group.size(), dim=place.dim % tensor.dim())
    places = [piece.reshape(-1) for piece in pieces]
    places += [flat[:0]] * (group.size() - len(places))
    return local, TokenShard(leading, tuple(places), group)


def _replicated(name: str, tensor: Tensor) -> Tensor:
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
