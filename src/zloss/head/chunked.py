"""The autograd function of losses that are computed in chunks.

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass. They are handed out once, so that the receiver may change them in place; a second
backward over a retained graph recomputes them. For reduction="none" the backward pass recomputes every chunk, because
only then the upstream gradient of every token is known.

Axes: T tokens.

[zloss.head.chunked] The chunked head loss: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of tokens three products: logits h Wᵀ, E W (for dh and the gain) and Eᵀh (for dW). What is done to a chunk of
logits between the products is a `RowWork`: plain PyTorch here, Triton kernels on a GPU.

Axes: T tokens.

[zloss.head.chunked] The chunked loss from logits: a chunk of rows is copied to a buffer, so the caller's logits are never overwritten.

Memory beyond the gradient: the buffers of one chunk.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.

[zloss.head.chunked] The chunks of a head loss: logits h Wᵀ, row work, E W, statistics and coefficients, one chunk of tokens at a time.

Axes: C tokens of a chunk, V vocabulary, D width.

[zloss.head.chunked] One chunk of tokens after its statistics, and what a pass over all chunks keeps of it.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.

[zloss.head.chunked] How many tokens a chunk has.

Large chunks need fewer passes over dW, small ones less memory. On the CPU the V-wide buffers stay near 128 MB: 512 tokens
at V = 50k was the fastest of 64..1024 on the CPUs measured (benchmarks/bench_head_loss.py prints the sweep).

On a GPU reading and writing an fp32 dW once per chunk moves 8·V·D bytes beside a product of 2·C·V·D operations, so it
hides behind the product from C = 4·(operations per second)/(bytes per second) tokens on: 1200 on an H100, 610 on an
A100, by the peak figures of the model in benchmarks/roofline.py. There a chunk has at least 1280 tokens and as many more
as the memory budget holds, a multiple of 128 of them, the tile of a tensor core product.

[zloss.head.chunked] dh, dW and db of a head loss, accumulated over chunks in compute precision.

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

Axes: C tokens of a chunk, V vocabulary, D width.

[zloss.head.chunked] What a backend returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
import torch
from torch import Tensor
from zloss.errors import DoubleBackwardError, InputError
from zloss.head.arguments import require_unit_upstream
from zloss.head.arguments import Targets
from zloss.errors import CoordinateError
from zloss.head.rows import RowWork
from zloss.head.arguments import HeadProblem
from collections.abc import Iterator
from dataclasses import replace
from zloss.objectives import inject, weighted_source
from zloss.head.rows import chunk_stats
from zloss.head.products import HeadProducts
from zloss.head.sharded import clear_absent_rows_, join_rows, row_pass
from zloss.head.products import product_exp
from zloss.head.rows import TorchRows
from zloss.head.arguments import LogitsProblem
from zloss.head.arguments import check_mean, check_rows, needs_mean
from dataclasses import dataclass
from zloss.head.sharded import TokenChunk
from zloss.objectives import inject
from zloss.statistics import TokenStats
from zloss.head.rows import chunk_stats, mean_energy
from zloss.head.sharded import JoinedRows, clear_absent_rows_, join_rows, row_pass
from zloss.head.rows import RowPass, RowWork, empty_narrow, empty_rows
from zloss.head.arguments import check_rows
from zloss.head.rows import softcap_slope
from zloss.head.sharded import VocabularyShard
from zloss.objectives import Injection, WeightedSource
from zloss.head.sharded import JoinedRows
from zloss.head.rows import RowPass, RowWork
from zloss.statistics import StatisticsPlan
import os
from zloss.errors import InputError
from zloss.objectives import weighted_source
from zloss.head.products import WeightFactors


# <<< zloss.head.chunked
Operands = tuple[Tensor | None, ...]
Run = Callable[[Operands, tuple[bool, ...], Tensor], ChunkedRun]
"""(operands, which gradients are wanted, weight of every token) → one pass over all chunks."""


def chunked_loss(
    operands: Operands, targets: Targets, vocab: int, run: Run, *, grad_enabled: bool, added_elsewhere: bool = False
) -> LossParts:
    """The loss as a differentiable function of its operands. `run` must not hold the operands: autograd keeps them.

    `added_elsewhere`: `run` adds a gradient to a buffer of the caller, so it must run once, with the true weights.
    """
    box: list[ChunkedRun] = []
    loss: Tensor = _ChunkedLoss.apply(run, targets, grad_enabled, added_elsewhere, box, *operands)  # type: ignore[no-untyped-call]
    return parts_of(loss, box[0], targets, vocab)


def wanted_gradients(operands: Operands, *, grad_enabled: bool) -> tuple[bool, ...]:
    """`grad_enabled` is that of the caller: inside an autograd.Function grad mode is always off."""
    return tuple(grad_enabled and operand is not None and operand.requires_grad for operand in operands)


def narrow(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient as it waits for backward: bf16 in bf16, as small as the parameter; fp16 in fp32, because the loss scale
    that keeps it from underflowing comes in backward."""
    if grad is None or like is None:
        return None
    return grad if like.dtype == torch.float16 else grad.to(like.dtype)


def refuse_double_backward() -> None:
    """Called in backward, where grad mode is on only for create_graph=True."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "this backend computes first derivatives only, but backward was called with create_graph=True: "
            "use backend='dense' for second derivatives."
        )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        targets: Targets,
        grad_enabled: bool,
        added_elsewhere: bool,
        box: list[ChunkedRun],
        *operands: Tensor | None,
    ) -> Tensor:
        scalar = targets.weights.reduction != "none"
        wanted = wanted_gradients(operands, grad_enabled=grad_enabled and scalar)
        done = run(operands, wanted, targets.weights.per_token)
        box.append(done)
        ctx.ready = []
        if any(wanted):
            ctx.ready.append([narrow(grad, like) for grad, like in zip(done.gradients, operands, strict=True)])
        done.gradients = ()
        # The operands are in save_for_backward alone, where checkpointing and version checks see them.
        ctx.save_for_backward(*operands)
        ctx.run, ctx.targets = run, targets
        ctx.once = added_elsewhere and scalar
        return reduced(targets, done.cross_entropy_T + done.auxiliary_T)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        if ctx.once:
            require_unit_upstream(upstream)
            if not ctx.ready:
                raise InputError("backward ran twice, but `weight_grad_buffer` takes dW once per call of the loss.")
        if ctx.ready:
            # On the CPU reading the upstream scalar costs nothing, and a factor of 1 saves a pass over every gradient.
            unit = upstream.device.type == "cpu" and float(upstream) == 1.0
            grads = [grad if grad is None or unit else grad.mul_(upstream) for grad in ctx.ready.pop()]
        else:
            weight_T = ctx.targets.weights.per_token * upstream
            grads = list(ctx.run(ctx.saved_tensors, ctx.needs_input_grad[5:], weight_T).gradients)
        return None, None, None, None, None, *grads


# <<< zloss.head.chunked
def chunked_head_loss(problem: HeadProblem, work: RowWork) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias."""
    rest = problem.without_operands()

    def run(operands: Operands, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
        hidden_TD, weight_VD, bias_V = operands
        assert hidden_TD is not None
        assert weight_VD is not None
        return run_head_chunks(rest.with_operands(hidden_TD, weight_VD, bias_V), work, wanted, weight_T)

    return chunked_loss(
        problem.operands,
        problem.targets,
        problem.shard.total,
        run,
        grad_enabled=problem.grad_enabled,
        added_elsewhere=problem.weight_grad_buffer is not None,
    )


def run_head_chunks(problem: HeadProblem, work: RowWork, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients (hidden, weight, bias) of Σ_t weight_t·(CE_t + aux_t)."""
    _refuse_capped_smoothing(problem)
    run = ChunkedRun(problem.targets, problem.plan)
    gradients = GradientAccumulators(problem, wanted, weight_T) if any(wanted) else None
    # Operands were rounded to the autocast dtype where asked; from there on nothing may be rounded again.
    with torch.autocast(problem.products.device_type, enabled=False):
        _pass_over_chunks(problem, work, wanted[0], run, gradients)
        run.gradients = (None, None, None) if gradients is None else gradients.finish()
    return run


def _pass_over_chunks(
    problem: HeadProblem, work: RowWork, back_projection: bool, run: ChunkedRun, gradients: GradientAccumulators | None
) -> None:
    """Every chunk once. The V-wide buffers are gone when this returns, before a gradient is copied to 16 bits."""
    for chunk in iterate_head_chunks(problem, back_projection=back_projection, work=work):
        run.keep(chunk)
        if gradients is not None:
            gradients.add(chunk)


def _refuse_capped_smoothing(problem: HeadProblem) -> None:
    if problem.options.softcap is not None and problem.options.label_smoothing:
        raise CoordinateError(
            "`label_smoothing` with `softcap` needs the slope of every logit in a second V-wide product, which this "
            "backend does not form: use backend='dense'."
        )


# <<< zloss.head.chunked
def chunked_logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss in chunks, with gradient to the logits."""
    rest = problem.with_logits(problem.logits_TV.new_empty(0))

    def run(operands: Operands, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
        (logits_TV,) = operands
        assert logits_TV is not None
        return _run_logits_chunks(rest.with_logits(logits_TV), wanted[0], weight_T)

    return chunked_loss(
        (problem.logits_TV,), problem.targets, problem.shard.total, run, grad_enabled=problem.grad_enabled
    )


def _run_logits_chunks(problem: LogitsProblem, wanted: bool, weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the gradient of Σ_t weight_t·(CE_t + aux_t) in the dtype of the logits."""
    run = ChunkedRun(problem.targets, problem.plan)
    work = TorchRows(problem.options.softcap, keep_slope=wanted)
    vocab, scale = problem.vocab, problem.options.logit_scale
    grad_TV = torch.zeros_like(problem.logits_TV) if wanted else None
    with torch.autocast(problem.logits_TV.device.type, enabled=False):
        for chunk in _iterate_logits_chunks(problem, work):
            run.keep(chunk)
            if grad_TV is not None:
                valid_C, sum_C = chunk.stats.valid, chunk.joined.sums.sum_C
                source = weighted_source(chunk.injection, sum_C, valid_C, weight_T[chunk.tokens])
                grad_CV = own_source(work, problem.shard, chunk, valid_C, source, through_softcap=True)
                grad_TV[chunk.tokens, :vocab] = grad_CV if scale == 1 else grad_CV.mul_(scale)
    run.gradients = (grad_TV,)
    return run


def _iterate_logits_chunks(problem: LogitsProblem, work: RowWork) -> Iterator[LogitsChunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused."""
    options, targets, plan, vocab = problem.options, problem.targets, problem.plan, problem.vocab
    shard = problem.shard
    head = None
    if problem.weight_VD is not None and plan.gain:
        head = HeadProducts(problem.weight_VD[:vocab], problem.dtype, None, problem.products)
    mean_row_D = shard.mean(head.mean()) if head is not None and plan.gain_centered else None
    bounds = chunk_bounds(
        problem.logits_TV.shape[0],
        shard.widest * problem.dtype.itemsize * work.buffers,
        options.chunk_size,
        device_type=problem.products.device_type,
        memory_budget=options.memory_budget,
    )
    longest = max((stop - start for start, stop in bounds), default=0)
    buffers_BCV = problem.logits_TV.new_empty((work.buffers, longest, vocab), dtype=problem.dtype)
    for start, stop in bounds:
        tokens = slice(start, stop)
        valid_C = targets.valid_T[tokens]
        index_C, own_C = shard.own_targets(targets.index_T[tokens])
        z_CV = buffers_BCV[0, : stop - start].copy_(problem.logits_TV.detach()[tokens, :vocab])
        if options.logit_scale != 1:
            z_CV.mul_(options.logit_scale)
        mean = plan.mu or needs_mean(options)
        rows = row_pass(
            work, buffers_BCV[:, : stop - start], None, index_C, norm=plan.p_norm, mean=mean, drop=plan.entropy
        )
        if not shard.whole:
            clear_absent_rows_(rows)
        joined = join_rows(shard, rows, own_C, drop=plan.entropy)
        projected_CD = None
        if head is not None:
            projected_CD = head.back_project(product_exp(rows.e_CV, problem.products))
            if not shard.whole:
                projected_CD = shard.sum_(joined.scaled_rows(projected_CD))
        stats = chunk_stats(
            plan,
            joined.sums,
            joined.target_logit_C,
            valid_C,
            shard.total,
            mu_C=joined.mean_logit_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=options.logit_scale,
        )
        check_rows(stats)
        check_mean(joined.mean_logit_C, valid_C, options)
        # Under softcap the mean is no coordinate and stays out of the record, but label smoothing uses it.
        injection = inject(replace(stats, mu=joined.mean_logit_C), options.objective, options.label_smoothing)
        yield LogitsChunk(tokens, index_C, rows, joined, stats, injection)


# <<< zloss.head.chunked
def iterate_head_chunks(
    problem: HeadProblem, *, back_projection: bool, work: RowWork | None = None
) -> Iterator[HeadChunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next.

    E W is formed where `back_projection` asks for it or the plan has the gain.
    """
    products, options = problem.products, problem.options
    work = TorchRows(options.softcap, plan=products) if work is None else work
    head_pass = _HeadPass.over(problem, work, back_projection)
    bounds = chunk_bounds(
        problem.targets.index_T.shape[0],
        problem.shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow),
        options.chunk_size,
        device_type=products.device_type,
        memory_budget=options.memory_budget,
    )
    spans = _spans(problem, bounds)
    longest = max([span.count for span in spans], default=0)
    buffers_BCV = empty_rows(work.buffers, longest, problem.vocab, problem.dtype, products, problem.hidden_TD)
    narrow_CV = empty_narrow(products, longest, problem.vocab, problem.hidden_TD)
    for span, narrow_CD in _with_hidden(problem, spans):
        narrow = None if narrow_CV is None else narrow_CV[: span.count]
        yield head_pass.chunk(span, narrow_CD, buffers_BCV[:, : span.count], narrow)


@dataclass(frozen=True)
class _HeadPass:
    """What all chunks of one pass have in common."""

    problem: HeadProblem
    work: RowWork
    back_projection: bool
    """Whether E W is wanted for dh."""
    head: HeadProducts
    bias_V: Tensor | None
    """s·b."""
    mean_row_D: Tensor | None
    """w̄, where μ is planned."""
    mean_bias: Tensor | None
    """Mean of s·b."""
    drop: bool
    """Whether the entropy comes from a pass over E."""

    @classmethod
    def over(cls, problem: HeadProblem, work: RowWork, back_projection: bool) -> _HeadPass:
        plan, products, shard = problem.plan, problem.products, problem.shard
        head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding, products)
        bias_V = problem.scaled_bias()
        mean_row_D, mean_bias = _means(problem, head, bias_V) if plan.mu else (None, None)
        # Without a mean the entropy is not in E W; with a bias it also needs E·b, which a 16-bit E does not give, and on
        # a shard E W is of own rows alone.
        drop = plan.entropy and (not plan.mu or (bias_V is not None and products.narrow) or not shard.whole)
        return cls(problem, work, back_projection, head, bias_V, mean_row_D, mean_bias, drop)

    def chunk(self, span: _Span, narrow_CD: Tensor, buffers_BCV: Tensor, narrow_CV: Tensor | None) -> HeadChunk:
        """Logits, row work, E W, statistics and coefficients of one span; the buffers are those of its tokens."""
        problem, plan, shard, options = self.problem, self.problem.plan, self.problem.shard, self.problem.options
        valid_C = problem.targets.valid_T[span.tokens]
        index_C, own_C = shard.own_targets(problem.targets.index_T[span.tokens])
        hidden_CD = self._logits_(narrow_CD, buffers_BCV[0])
        rows = row_pass(
            self.work, buffers_BCV, narrow_CV, index_C, norm=plan.p_norm, mean=plan.mu_residual, drop=self.drop
        )
        if problem.masked and not shard.whole:
            clear_absent_rows_(rows)
        joined = join_rows(shard, rows, own_C, drop=self.drop)
        projected_CD = target_rows_CD = None
        if self.back_projection or plan.gain:
            projected_CD = self.head.back_project(rows.e_CV)
        partial = not (shard.whole or plan.gain)
        if projected_CD is not None and not shard.whole and not partial:
            projected_CD, target_rows_CD = self._over_ranks(joined, projected_CD, index_C)
        stats = self._statistics(rows, joined, valid_C, hidden_CD, projected_CD)
        check_rows(stats)
        return HeadChunk(
            tokens=span.tokens,
            index_C=index_C,
            rows=rows,
            joined=joined,
            stats=stats,
            injection=inject(stats, options.objective, options.label_smoothing),
            hidden_CD=hidden_CD,
            target_slope_C=None if options.softcap is None else softcap_slope(joined.target_logit_C, options.softcap),
            projected_CD=projected_CD,
            target_rows_CD=target_rows_CD,
            partial=partial,
            mean_row_D=self.mean_row_D,
            part=span.part,
        )

    def _logits_(self, narrow_CD: Tensor, out_CV: Tensor) -> Tensor:
        """out = s(W u + b) before the softcap; returns s·u in compute precision."""
        problem, scale = self.problem, self.problem.options.logit_scale
        if problem.rounding is not None:
            narrow_CD = narrow_CD.to(problem.rounding)
        hidden_CD = narrow_CD.to(problem.dtype)
        if scale != 1:
            hidden_CD = hidden_CD * scale
        if problem.products.native:
            self.head.logits_(narrow_CD, out_CV)
            if scale != 1:
                out_CV.mul_(scale)
        else:
            self.head.logits_(hidden_CD, out_CV)
        if self.bias_V is not None:
            out_CV.add_(self.bias_V)
        return hidden_CD

    def _over_ranks(self, joined: JoinedRows, own_CD: Tensor, index_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """exp(z − m) W, and W[y] where dh is wanted, of the whole vocabulary from E W of own rows: one sum over ranks."""
        width, shard = own_CD.shape[1], self.problem.shard
        own_CD = joined.scaled_rows(own_CD)
        if not self.back_projection:
            return shard.sum_(own_CD), None
        ones_C = own_CD.new_ones(own_CD.shape[0])
        if shard.rows:
            picked_CD = self.head.select(index_C) * joined.own_target(ones_C).unsqueeze(1)
        else:
            picked_CD = torch.zeros_like(own_CD)
        both_CX = shard.sum_(torch.cat([own_CD, picked_CD], dim=1))
        return both_CX[:, :width].contiguous(), both_CX[:, width:]

    def _statistics(
        self, rows: RowPass, joined: JoinedRows, valid_C: Tensor, hidden_CD: Tensor, projected_CD: Tensor | None
    ) -> TokenStats:
        plan, mean_row_D = self.problem.plan, self.mean_row_D
        mu_C = energy_C = None
        if mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if self.mean_bias is None else mu_C + self.mean_bias
        if plan.entropy and joined.sums.drop_C is None:
            assert projected_CD is not None
            assert mean_row_D is not None
            energy_C = mean_energy(
                rows.sums, rows.e_CV, hidden_CD, projected_CD, mean_row_D, self.bias_V, self.mean_bias
            )
        return chunk_stats(
            plan,
            joined.sums,
            joined.target_logit_C,
            valid_C,
            self.problem.shard.total,
            mu_C=mu_C,
            mean_logit_C=joined.mean_logit_C,
            mean_energy_C=energy_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=self.problem.options.logit_scale,
        )


@dataclass(frozen=True)
class _Span:
    """The tokens of one chunk: a range of those of this process, or some of every rank."""

    tokens: slice | Tensor
    count: int
    part: TokenChunk | None = None


def _with_hidden(problem: HeadProblem, spans: list[_Span]) -> Iterator[tuple[_Span, Tensor]]:
    """Every span with its hidden states [C, D]. Those of other ranks are fetched while the span before is worked on."""
    own_TD = problem.hidden_TD.detach()
    if problem.tokens is None:
        yield from ((span, own_TD[span.tokens]) for span in spans)
        return
    parts = [span.part for span in spans if span.part is not None]
    following = parts[0].start_gather(own_TD) if parts else None
    for place, span in enumerate(spans):
        assert following is not None
        current = following
        following = parts[place + 1].start_gather(own_TD) if place + 1 < len(parts) else None
        yield span, current.wait()


def _spans(problem: HeadProblem, bounds: list[tuple[int, int]]) -> list[_Span]:
    if problem.tokens is None or not bounds:
        return [_Span(slice(start, stop), stop - start) for start, stop in bounds]
    longest = max(stop - start for start, stop in bounds)
    return [_Span(part.tokens_C, len(part.tokens_C), part) for part in problem.tokens.chunks(longest)]


def _means(problem: HeadProblem, head: HeadProducts, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """w̄ and the mean of s·b over the whole vocabulary."""
    if bias_V is None:
        return problem.shard.mean(head.mean()), None
    means = problem.shard.mean(torch.cat([head.mean(), bias_V.mean(dim=0, keepdim=True)]))
    return means[:-1], means[-1]


# <<< zloss.head.chunked
@dataclass(frozen=True)
class LogitsChunk:
    """The rows of a chunk with their statistics, and what is injected. The buffers behind it are reused by the next."""

    tokens: slice | Tensor
    """Places among all tokens: a range, or an index [C] where ranks hold tokens of their own."""
    index_C: Tensor
    """Targets as own rows; 0 where the target is another rank's."""
    rows: RowPass
    """Own rows of the vocabulary; all of them on one process."""
    joined: JoinedRows
    """The sums over the whole vocabulary."""
    stats: TokenStats
    injection: Injection


def own_source(
    work: RowWork,
    shard: VocabularyShard,
    chunk: LogitsChunk,
    valid_C: Tensor,
    source: WeightedSource,
    *,
    through_softcap: bool,
) -> Tensor:
    """A source of the whole vocabulary on own rows, [C, rows]; the rows of the chunk are consumed."""
    if not shard.rows:
        return chunk.rows.source_CV
    if not shard.whole:
        # Where every own logit is -inf there is no E and no source.
        valid_C = valid_C & ~torch.isneginf(chunk.rows.sums.row_max_C)
    own = chunk.joined.own_source(source, shard)
    return work.source(chunk.rows, chunk.index_C, valid_C, own, through_softcap=through_softcap)


@dataclass(frozen=True)
class HeadChunk(LogitsChunk):
    """A chunk of logits that came from hidden states and the head."""

    hidden_CD: Tensor
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """exp(z − m) W, unnormalised; E W of own rows alone where `partial`."""
    target_rows_CD: Tensor | None
    """W[y], where a sum over ranks was needed to have it on each."""
    partial: bool
    """Whether E W and W[y] are of own rows alone, so that dh is to be summed over ranks."""
    mean_row_D: Tensor | None
    """w̄."""
    part: TokenChunk | None = None
    """Whose tokens they are, where ranks hold tokens of their own."""


class ChunkedRun:
    """What a pass over all chunks leaves: values and statistics per token, gradients of Σ_t weight_t·ℓ_t."""

    def __init__(self, targets: Targets, plan: StatisticsPlan) -> None:
        like, tokens = targets.weights.per_token, targets.index_T.shape[0]
        self.cross_entropy_T = like.new_zeros(tokens)
        self.auxiliary_T = like.new_zeros(tokens)
        self.stats = {name: like.new_zeros(tokens) for name in plan.present}
        self.gradients: tuple[Tensor | None, ...] = ()
        """One per operand of the loss; None where it was not asked for."""

    def keep(self, chunk: LogitsChunk) -> None:
        """Copy the values and statistics of a chunk to their tokens."""
        self.cross_entropy_T[chunk.tokens] = chunk.injection.cross_entropy
        self.auxiliary_T[chunk.tokens] = chunk.injection.auxiliary
        for name, value_T in self.stats.items():
            value_T[chunk.tokens] = getattr(chunk.stats, name)


# <<< zloss.head.chunked
CPU_BYTES = 2**27
"""Default size of the V-wide buffers of a chunk together, off a GPU."""
GPU_BYTES = 5 * 2**28
"""The same on a GPU: 1.25 GiB."""
BUDGET_VARIABLE = "ZLOSS_CHUNK_BYTES"
"""Environment variable that replaces both defaults; the option `memory_budget` comes before it."""
GPU_TOKENS = 1280
"""Fewest tokens of a chunk on a GPU, whatever the budget; `chunk_size` alone goes below."""
TILE = 128


def chunk_bounds(
    tokens: int,
    token_bytes: int,
    chunk_size: int | None = None,
    *,
    device_type: str = "cpu",
    memory_budget: int | None = None,
) -> list[tuple[int, int]]:
    """Token ranges of nearly equal length; `token_bytes` is the size of the V-wide buffers of one token."""
    if tokens == 0:
        return []
    budget = memory_budget if memory_budget is not None else _default_budget()
    if chunk_size is not None:
        size = chunk_size
    elif device_type == "cuda":
        size = max(GPU_TOKENS, (budget or GPU_BYTES) // token_bytes // TILE * TILE)
    elif budget is not None:
        size = max(1, budget // token_bytes)
    else:
        size = min(1024, max(32, CPU_BYTES // token_bytes))
    count = -(-tokens // size)
    step = -(-tokens // count)
    if chunk_size is None and device_type == "cuda":
        step = -(-step // TILE) * TILE
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


_IN_ENVIRONMENT = os.environ.get(BUDGET_VARIABLE, "")
"""Read once: a compiler that traces a loss cannot follow the environment."""


def _default_budget() -> int | None:
    if not _IN_ENVIRONMENT:
        return None
    if not _IN_ENVIRONMENT.isdecimal() or int(_IN_ENVIRONMENT) == 0:
        raise InputError(f"{BUDGET_VARIABLE} is expected to be a number of bytes ≥ 1, but got {_IN_ENVIRONMENT!r}.")
    return int(_IN_ENVIRONMENT)


# <<< zloss.head.chunked
class GradientAccumulators:
    """The wanted ones of dh, dW and db of Σ_t weight_t·(CE_t + aux_t)."""

    def __init__(self, problem: HeadProblem, wanted: tuple[bool, ...], weight_T: Tensor) -> None:
        self._problem, self._weight_T = problem, weight_T
        self._head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding, problem.products)
        self._factors = WeightFactors(problem, weight_T)
        dtype, device = problem.dtype, problem.hidden_TD.device
        rows, width = problem.weight_VD.shape
        hidden, weight, bias = wanted
        self._hidden_TD = torch.empty(problem.hidden_TD.shape, dtype=dtype, device=device) if hidden else None
        self._given = weight and problem.weight_grad_buffer is not None
        self._started = self._given
        """Whether dW holds something already; it starts uninitialised where it is not given."""
        self._weight_VD = None
        if self._given:
            assert problem.weight_grad_buffer is not None
            self._weight_VD = problem.weight_grad_buffer
            self._factors.enter_(self._weight_VD[: problem.vocab])
        elif weight:
            self._weight_VD = torch.empty(rows, width, dtype=dtype, device=device)
        self._bias_V = torch.zeros(rows, dtype=dtype, device=device) if bias else None
        self._uniform_D = torch.zeros(width, dtype=dtype, device=device)
        self._uniform = torch.zeros((), dtype=dtype, device=device)
        self._has_uniform = False
        self._sums: list[Any] = []
        """Sums of dh over ranks that are under way."""

    def add(self, chunk: HeadChunk) -> None:
        """Add the gradients of a chunk; its E W is consumed."""
        weight_C = self._weight_T[chunk.tokens]
        source = weighted_source(chunk.injection, chunk.joined.sums.sum_C, chunk.stats.valid, weight_C)
        p_C, target_C, uniform_C = source.along_exp_C, source.along_target_C, source.along_uniform_C
        assert target_C is not None
        if chunk.target_slope_C is not None:
            target_C = torch.where(chunk.stats.valid, target_C * chunk.target_slope_C, target_C.new_zeros(()))
        self._has_uniform = self._has_uniform or uniform_C is not None
        own_p_C, own_target_C = chunk.joined.own_exp(p_C), chunk.joined.own_target(target_C)
        if self._hidden_TD is not None and not chunk.partial:
            whole_CD = self._hidden_gradient(chunk, p_C, target_C, uniform_C)
            if chunk.part is None:
                self._hidden_TD[chunk.tokens] = whole_CD
            else:
                self._hidden_TD[chunk.part.own_rows] = whole_CD[chunk.part.own_in_chunk]
        elif self._hidden_TD is not None:
            shared_C = uniform_C if self._problem.shard.adds_shared_terms else None
            own_CD = self._hidden_gradient(chunk, own_p_C, own_target_C, shared_C)
            # The sum over ranks runs beside the products of this chunk's dW and of the next chunk.
            if chunk.part is None:
                place_CD = self._hidden_TD[chunk.tokens]
                place_CD.copy_(own_CD)
                self._sums.append(self._problem.shard.start_sum_(place_CD))
            else:
                while self._sums:  # what is summed is a buffer of its own here: one at a time
                    self._sums.pop().wait()
                self._sums.append(chunk.part.start_scatter(own_CD, self._hidden_TD))
        if self._weight_VD is not None:
            inside_VD = self._weight_VD[: self._problem.vocab]
            self._factors.add_(inside_VD, self._head, chunk, own_p_C, own_target_C, first=not self._started)
            if uniform_C is not None:
                self._uniform_D += uniform_C @ chunk.hidden_CD
        if self._bias_V is not None:
            self._factors.add_bias_(self._bias_V[: self._problem.vocab], self._head, chunk, own_p_C)
            if self._problem.vocab:
                self._bias_V.index_add_(0, chunk.index_C, own_target_C, alpha=-1)
            if uniform_C is not None:
                self._uniform += uniform_C.sum()
        self._started = True

    def _hidden_gradient(self, chunk: HeadChunk, p_C: Tensor, target_C: Tensor, uniform_C: Tensor | None) -> Tensor:
        """w (a·Wᵀp − b·W[y] − g·w̄); the E W of the chunk is consumed."""
        assert chunk.projected_CD is not None
        grad_CD = chunk.projected_CD.mul_(p_C.unsqueeze(1))
        target_rows_CD = chunk.target_rows_CD
        if target_rows_CD is None and self._problem.vocab:
            target_rows_CD = self._head.select(chunk.index_C)
        if target_rows_CD is not None:
            grad_CD.addcmul_(target_rows_CD, target_C.unsqueeze(1), value=-1)
        if uniform_C is not None:
            assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
            grad_CD.addr_(uniform_C, chunk.mean_row_D, alpha=-1)
        return grad_CD

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk; no dW where it went to a given buffer."""
        vocab, total, scale = self._problem.vocab, self._problem.shard.total, self._problem.options.logit_scale
        for pending in self._sums:
            pending.wait()
        if self._weight_VD is not None:
            if not self._started:
                self._weight_VD.zero_()
            self._weight_VD = self._finished_weight(self._weight_VD)
        if self._bias_V is not None:
            if self._has_uniform:
                self._bias_V[:vocab].sub_(self._uniform / total)
            self._bias_V.mul_(scale)
        if self._hidden_TD is not None and scale != 1:
            self._hidden_TD.mul_(scale)
        return self._hidden_TD, None if self._given else self._weight_VD, self._bias_V

    def _finished_weight(self, weight_VD: Tensor) -> Tensor:
        """dW less its part along 1/V, in the unit of the gradient. Where a pass is needed anyway, a bf16 dW is rounded in it:
        it would be rounded next."""
        vocab, out_VD = self._problem.vocab, weight_VD
        uniform_D = self._uniform_D / self._problem.shard.total if self._has_uniform else None
        passes = uniform_D is not None or self._factors.scaled
        if passes and self._problem.weight_VD.dtype == torch.bfloat16 and not self._given:
            out_VD = torch.empty_like(weight_VD, dtype=torch.bfloat16)
        self._factors.leave(weight_VD[:vocab], uniform_D, out_VD[:vocab])
        if not self._given:
            out_VD[vocab:].zero_()
        return out_VD


# <<< zloss.head.chunked
@dataclass(frozen=True)
class LossParts:
    """The loss, reduced, with gradient; its two parts, detached; the statistics of all tokens on one axis."""

    loss: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor
    stats: TokenStats


def reduced(targets: Targets, value_T: Tensor) -> Tensor:
    """Σ_t w_t·value_t for "mean" and "sum", w_t·value_t for "none"; 0 at ignored tokens."""
    weighted_T = targets.weighted(value_T)
    return weighted_T if targets.weights.reduction == "none" else weighted_T.sum()


def parts_of(loss: Tensor, run: ChunkedRun, targets: Targets, vocab: int) -> LossParts:
    """The parts of a loss that was computed in chunks."""
    stats = TokenStats(valid=targets.valid_T, vocab=vocab, **run.stats)
    return LossParts(loss, reduced(targets, run.cross_entropy_T), reduced(targets, run.auxiliary_T), stats)
