"""The chunked losses: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of C tokens: logits → row sums and E = exp(z − m) → statistics → the objective's coefficients (a, b, g) →
gradients. From hidden states that takes three matrix products, h Wᵀ, E W (for dh and the gain) and Eᵀ(s∘h) (for dW):

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass. For reduction="none" the backward pass recomputes every chunk, because the per-token
upstream gradients are only known then.

What is done to a chunk of logits between the products is a `RowWork`: PyTorch (`rows.py`), or Triton kernels. The losses
of hidden states and of logits are in one module because they share the autograd function and the work on a chunk.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width, B buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from zloss.errors import DoubleBackwardError, InputError
from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, LossProblem, check_mean
from zloss.head.gradient_buffer import added_to_main_grad, is_main_grad, require_unit_upstream
from zloss.head.products import BiasGradient, HeadProducts, WeightGradient, factor_units, product_exp
from zloss.head.rows import (
    RowPass,
    RowSums,
    RowWork,
    TorchRows,
    chunk_stats,
    empty_narrow,
    empty_rows,
    mean_energy,
    row_pass,
    softcap_slope,
)
from zloss.head.sharded import RankShare, TokenChunk, VocabularyShard, join_rows, token_spans, with_hidden
from zloss.objectives import Coefficients, TokenLoss, token_loss
from zloss.statistics import TokenStats


def chunked_head_loss(problem: HeadProblem, work: RowWork | None = None) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias; `work` is by default that of PyTorch."""
    return _chunked_loss(problem, partial(run_head_chunks, work=work))


def chunked_logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss in chunks, with gradient to the logits, which are never overwritten."""
    return _chunked_loss(problem, _run_logits_chunks)


# --- autograd -----------------------------------------------------------------------------------------------------------


class ChunkedRun:
    """What a pass over all chunks leaves: values and statistics per token, gradients of Σ_t weight_t·ℓ_t."""

    def __init__(self, problem: LossProblem) -> None:
        self._targets, self._vocab = problem.targets, problem.shard.total
        like, tokens = self._targets.weight_T, self._targets.index_T.shape[0]
        self._cross_entropy_T = like.new_zeros(tokens)
        self._auxiliary_T = like.new_zeros(tokens)
        self._stats = {name: like.new_zeros(tokens) for name in problem.plan.present}
        self.gradients: tuple[Tensor | None, ...] = ()
        """One per operand of the loss; None if it is not wanted."""

    def keep(self, chunk: Chunk) -> None:
        """Copy the values and statistics of a chunk to their tokens."""
        self._cross_entropy_T[chunk.tokens] = chunk.loss.cross_entropy
        self._auxiliary_T[chunk.tokens] = chunk.loss.auxiliary
        for name, value_T in self._stats.items():
            value_T[chunk.tokens] = getattr(chunk.stats, name)

    def value(self) -> Tensor:
        """The loss without its gradient."""
        return self._targets.reduced(self._cross_entropy_T + self._auxiliary_T)

    def parts(self, loss: Tensor) -> LossParts:
        """What a backend returns; `loss` is `value()` with its gradient."""
        stats = TokenStats(valid=self._targets.valid_T, vocab=self._vocab, **self._stats)
        return loss, self._targets.reduced(self._cross_entropy_T), self._targets.reduced(self._auxiliary_T), stats


Problem = TypeVar("Problem", bound=LossProblem)
Run = Callable[[Problem, tuple[bool, ...], Tensor], ChunkedRun]
"""(problem, which gradients are wanted, weight of every token) → one pass over all chunks."""


def _chunked_loss(problem: Problem, run: Run[Problem]) -> LossParts:
    """The loss as a differentiable function of its operands."""
    done: list[ChunkedRun] = []
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        run, problem.without_operands(), done, *problem.operands
    )
    return done[0].parts(loss)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run[Any], problem: LossProblem, done: list[ChunkedRun], *operands: Tensor | None
    ) -> Tensor:
        """`problem` is without its operands, which go through `save_for_backward`, where checkpointing and version checks
        see them. The run is appended to `done`."""
        scalar = problem.targets.reduction != "none"
        wanted = wanted_gradients(operands, grad_enabled=problem.grad_enabled and scalar)
        result = run(problem.with_operands(operands), wanted, problem.targets.weight_T)
        done.append(result)
        # Handed out once, so that the receiver may change them in place; a second backward recomputes them.
        ctx.ready = []
        if any(wanted):
            ctx.ready.append(
                [stored_gradient(grad, like) for grad, like in zip(result.gradients, operands, strict=True)]
            )
        result.gradients = ()
        ctx.save_for_backward(*operands)
        ctx.run, ctx.problem = run, problem
        # With a buffer, dW is added by the pass above, which must not run again.
        ctx.once = scalar and problem.weight_grad_buffer is not None
        # Kept in addition, because Megatron reads attributes of the parameter, which a saved tensor need not have.
        buffer = problem.weight_grad_buffer
        ctx.megatron_weight = operands[1] if buffer is not None and is_main_grad(buffer, operands[1]) else None
        return result.value()

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
            problem, weight_T = ctx.problem.with_operands(ctx.saved_tensors), ctx.problem.targets.weight_T * upstream
            grads = list(ctx.run(problem, ctx.needs_input_grad[3:], weight_T).gradients)
        if ctx.megatron_weight is not None:
            grads[1] = added_to_main_grad(ctx.megatron_weight)
        return None, None, None, *grads


def wanted_gradients(operands: tuple[Tensor | None, ...], *, grad_enabled: bool) -> tuple[bool, ...]:
    """`grad_enabled` is that of the caller: inside an autograd.Function grad mode is always off."""
    return tuple(grad_enabled and operand is not None and operand.requires_grad for operand in operands)


def stored_gradient(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
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


# --- from hidden states -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """The rows of a chunk with their statistics and coefficients. The buffers behind it are reused by the next one."""

    tokens: slice | Tensor
    """Positions among all tokens: a range, or an index [C] if every rank holds some of the tokens."""
    index_C: Tensor
    """Targets as local rows; 0 where the target is another rank's."""
    rows: RowPass
    """Local rows of the vocabulary; all of them on one process."""
    sums: RowSums
    """Over the whole vocabulary."""
    share: RankShare
    stats: TokenStats
    loss: TokenLoss

    def weighted(self, coefficients: Coefficients, weight_T: Tensor) -> Coefficients:
        """The coefficients of E instead of p, weighted by `weight_T` (reduction and upstream gradient)."""
        return coefficients.weighted(weight_T[self.tokens], self.stats.valid, self.sums.sum_C)


@dataclass(frozen=True)
class HeadChunk(Chunk):
    """A chunk of logits that came from hidden states and the head."""

    hidden_CD: Tensor
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """exp(z − m) W, unnormalised; the E W of local rows if the problem's projection is partial."""
    target_rows_CD: Tensor | None
    """W[y], where a sum over ranks was needed to have it on each."""
    mean_row_D: Tensor | None
    """w̄."""
    token_chunk: TokenChunk | None
    """Which rank has which tokens, if every rank holds some of them."""


def run_head_chunks(
    problem: HeadProblem, wanted: tuple[bool, ...], weight_T: Tensor, work: RowWork | None = None
) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients (hidden, weight, bias) of Σ_t weight_t·(CE_t + aux_t)."""
    run = ChunkedRun(problem)
    gradients = _HeadGradients(problem, wanted, weight_T) if any(wanted) else None
    # Operands are already rounded to the autocast dtype; from there on nothing may be rounded again.
    with torch.autocast(problem.products.device_type, enabled=False):
        chunk: HeadChunk | None = None
        for chunk in head_chunks(problem, back_projection=wanted[0], work=work):
            run.keep(chunk)
            if gradients is not None:
                gradients.add(chunk)
        del chunk  # frees the V-wide buffers before a gradient is copied to 16 bits
        run.gradients = (None, None, None) if gradients is None else gradients.finish()
    return run


def head_chunks(problem: HeadProblem, *, back_projection: bool, work: RowWork | None = None) -> Iterator[HeadChunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next.

    E W is formed if `back_projection` requests it or the plan has the gain.
    """
    options, targets, shard = problem.options, problem.targets, problem.shard
    plan, products = problem.plan, problem.products
    work = TorchRows(options.softcap, plan=products) if work is None else work
    head, drop = _Head.of(problem), _entropy_needs_a_pass(problem)

    token_bytes = shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow)
    bounds = options.chunk_bounds(targets.index_T.shape[0], token_bytes, products.device_type)
    spans = token_spans(problem.tokens, bounds)
    longest = max([span.length for span in spans], default=0)
    buffers_BCV = empty_rows(work.buffers, longest, problem.vocab, problem.dtype, products, problem.hidden_TD)
    narrow_CV = empty_narrow(products, longest, problem.vocab, problem.hidden_TD)

    for span, operand_CD in with_hidden(spans, problem.hidden_TD.detach()):
        index_C, has_target_C = shard.local_targets(targets.index_T[span.tokens])

        # Product 1, h Wᵀ: the logits, in the first buffer. The row pass then overwrites them with E.
        hidden_CD = _logits_(problem, head, operand_CD, buffers_BCV[0, : span.length])
        rows = row_pass(
            work,
            buffers_BCV[:, : span.length],
            None if narrow_CV is None else narrow_CV[: span.length],
            index_C,
            norm=plan.p_norm,
            mean=plan.mu_residual,
            drop=drop,
        )
        sums, share = join_rows(shard, rows.sums, has_target_C, drop=drop)

        # Product 2, E W = S·Wᵀp: for the gain and for dh. Product 3, Eᵀ(s∘h), is that of dW (`WeightGradient`).
        projected_CD = target_rows_CD = None
        if back_projection or plan.gain:
            projected_CD = head.products.back_project(rows.e_CV)
            if not shard.whole and not problem.partial_projection:
                projected_CD, target_rows_CD = _sum_over_ranks(
                    shard, head.products, share, projected_CD, index_C, with_target_rows=back_projection
                )

        stats = _head_stats(problem, head, rows, sums, targets.valid_T[span.tokens], hidden_CD, projected_CD)
        yield HeadChunk(
            tokens=span.tokens,
            index_C=index_C,
            rows=rows,
            sums=sums,
            share=share,
            stats=stats,
            loss=token_loss(stats, options.objective, options.label_smoothing),
            hidden_CD=hidden_CD,
            target_slope_C=None if options.softcap is None else softcap_slope(sums.target_logit_C, options.softcap),
            projected_CD=projected_CD,
            target_rows_CD=target_rows_CD,
            mean_row_D=head.mean_row_D,
            token_chunk=span.token_chunk,
        )


@dataclass(frozen=True)
class _Head:
    """W and s·b of the rows inside log Z, and their means over the whole vocabulary if the plan has μ."""

    products: HeadProducts
    bias_V: Tensor | None
    mean_row_D: Tensor | None = None
    mean_bias: Tensor | None = None

    @classmethod
    def of(cls, problem: HeadProblem) -> _Head:
        products, bias_V, shard = HeadProducts.of(problem), problem.scaled_bias(), problem.shard
        if not problem.plan.mu:
            return cls(products, bias_V)
        if bias_V is None:
            return cls(products, None, shard.mean(products.mean()))
        means = shard.mean(torch.cat([products.mean(), bias_V.mean(dim=0, keepdim=True)]))
        return cls(products, bias_V, means[:-1], means[-1])


def _entropy_needs_a_pass(problem: HeadProblem) -> bool:
    """Whether the entropy needs its own pass over E. Normally it comes from E W, but not if there is no mean, if a bias
    meets a 16-bit E (E·b would lose digits), or on a shard (E W covers local rows only)."""
    biased = problem.bias_V is not None and problem.products.narrow
    return problem.plan.entropy and (not problem.plan.mu or biased or not problem.shard.whole)


def _logits_(problem: HeadProblem, head: _Head, operand_CD: Tensor, out_CV: Tensor) -> Tensor:
    """out = s(W u + b) before the softcap; returns s·u in compute precision."""
    scale = problem.options.logit_scale
    if problem.rounding is not None:
        operand_CD = operand_CD.to(problem.rounding)
    hidden_CD = operand_CD.to(problem.dtype)
    if scale != 1:
        hidden_CD = hidden_CD * scale
    if problem.products.takes_16_bit:
        head.products.logits_(operand_CD, out_CV)
        if scale != 1:
            out_CV.mul_(scale)
    else:
        head.products.logits_(hidden_CD, out_CV)
    if head.bias_V is not None:
        out_CV.add_(head.bias_V)
    return hidden_CD


def _sum_over_ranks(
    shard: VocabularyShard,
    head: HeadProducts,
    share: RankShare,
    local_CD: Tensor,
    index_C: Tensor,
    *,
    with_target_rows: bool,
) -> tuple[Tensor, Tensor | None]:
    """exp(z − m) W, and W[y] where dh is wanted, of the whole vocabulary from the local E W: one sum over ranks."""
    width, local_CD = local_CD.shape[1], share.scaled(local_CD)
    if not with_target_rows:
        return shard.sum_(local_CD), None
    if shard.rows:
        has_target_C = share.local_b(local_CD.new_ones(local_CD.shape[0]))
        picked_CD = head.select(index_C) * has_target_C.unsqueeze(1)
    else:
        picked_CD = torch.zeros_like(local_CD)
    both_CX = shard.sum_(torch.cat([local_CD, picked_CD], dim=1))
    return both_CX[:, :width].contiguous(), both_CX[:, width:]


def _head_stats(
    problem: HeadProblem,
    head: _Head,
    rows: RowPass,
    sums: RowSums,
    valid_C: Tensor,
    hidden_CD: Tensor,
    projected_CD: Tensor | None,
) -> TokenStats:
    """The planned statistics, with μ = w̄·u + b̄ from the means of the head and not from the logits."""
    mean_row_D, mean_bias = head.mean_row_D, head.mean_bias
    mu_C = energy_C = None
    if mean_row_D is not None:
        mu_C = hidden_CD @ mean_row_D
        mu_C = mu_C if mean_bias is None else mu_C + mean_bias
    if problem.plan.entropy and sums.drop_C is None:
        assert projected_CD is not None
        assert mean_row_D is not None
        energy_C = mean_energy(sums.sum_C, rows.e_CV, hidden_CD, projected_CD, mean_row_D, head.bias_V, mean_bias)
    return chunk_stats(
        problem.plan,
        sums,
        valid_C,
        problem.shard.total,
        mu_C=mu_C,
        mean_energy_C=energy_C,
        projected_CD=projected_CD,
        mean_row_D=mean_row_D,
        logit_scale=problem.options.logit_scale,
    )


class _HeadGradients:
    """The wanted ones of dh, dW and db of Σ_t weight_t·(CE_t + aux_t), summed over chunks in compute precision."""

    def __init__(self, problem: HeadProblem, wanted: tuple[bool, ...], weight_T: Tensor) -> None:
        hidden, weight, bias = wanted
        self._problem, self._weight_T = problem, weight_T
        self._head = HeadProducts.of(problem)
        unit, bias_unit = factor_units(problem, weight_T)
        self._hidden_TD: Tensor | None = None
        if hidden:
            shape, device = problem.hidden_TD.shape, problem.hidden_TD.device
            self._hidden_TD = torch.empty(shape, dtype=problem.dtype, device=device)
        self._weight = WeightGradient(problem, self._head, unit) if weight else None
        self._bias = BiasGradient(problem, self._head, bias_unit) if bias else None
        self._pending: list[Callable[[], object]] = []
        """What waits for the sums of dh over ranks that are under way."""

    def add(self, chunk: HeadChunk) -> None:
        """Add the gradients of a chunk; its E W is consumed."""
        whole = chunk.weighted(chunk.loss.coefficients, self._weight_T)
        if chunk.target_slope_C is not None:
            assert whole.b is not None
            b_C = torch.where(chunk.stats.valid, whole.b * chunk.target_slope_C, whole.b.new_zeros(()))
            whole = replace(whole, b=b_C)
        local = chunk.share.local(whole)
        if self._hidden_TD is not None:
            self._add_hidden(chunk, whole, local, self._hidden_TD)
        if self._weight is not None:
            self._weight.add(chunk, local)
        if self._bias is not None:
            self._bias.add(chunk, local)

    def _add_hidden(self, chunk: HeadChunk, whole: Coefficients, local: Coefficients, out_TD: Tensor) -> None:
        """Write dh of a chunk to its tokens, from the coefficients of the whole vocabulary or those of the local rows."""
        if not self._problem.partial_projection:
            grad_CD = self._hidden_gradient(chunk, whole)
            if chunk.token_chunk is None:
                out_TD[chunk.tokens] = grad_CD
            else:
                out_TD[chunk.token_chunk.local_rows] = grad_CD[chunk.token_chunk.local_in_chunk]
            return
        # A sum over ranks, in parallel with the products of this chunk's dW and of the next chunk.
        shared = local if self._problem.shard.adds_shared_terms else replace(local, g=None)
        grad_CD = self._hidden_gradient(chunk, shared)
        if chunk.token_chunk is None:
            place_CD = out_TD[chunk.tokens]
            place_CD.copy_(grad_CD)
            self._pending.append(self._problem.shard.start_sum_(place_CD).wait)
            return
        while self._pending:  # each of these sums has a buffer: one at a time
            self._pending.pop()()
        self._pending.append(chunk.token_chunk.start_scatter(grad_CD, out_TD))

    def _hidden_gradient(self, chunk: HeadChunk, coefficients: Coefficients) -> Tensor:
        """w (a·Wᵀp − b·W[y] − g·w̄); the E W of the chunk is consumed."""
        assert chunk.projected_CD is not None
        assert coefficients.b is not None
        grad_CD = chunk.projected_CD.mul_(coefficients.a.unsqueeze(1))
        target_rows_CD = chunk.target_rows_CD
        if target_rows_CD is None and self._problem.vocab:
            target_rows_CD = self._head.select(chunk.index_C)
        if target_rows_CD is not None:
            grad_CD.addcmul_(target_rows_CD, coefficients.b.unsqueeze(1), value=-1)
        if coefficients.g is not None:
            assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
            grad_CD.addr_(coefficients.g, chunk.mean_row_D, alpha=-1)
        return grad_CD

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk; no dW if it went to the caller's buffer."""
        for wait in self._pending:
            wait()
        weight_VD = None if self._weight is None else self._weight.finish()
        bias_V = None if self._bias is None else self._bias.finish()
        scale = self._problem.options.logit_scale
        if self._hidden_TD is not None and scale != 1:
            self._hidden_TD.mul_(scale)
        return self._hidden_TD, weight_VD, bias_V


# --- from logits --------------------------------------------------------------------------------------------------------


def _run_logits_chunks(problem: LogitsProblem, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the gradient of Σ_t weight_t·(CE_t + aux_t) in the dtype of the logits."""
    run = ChunkedRun(problem)
    work = TorchRows(problem.options.softcap, keep_slope=wanted[0])
    vocab, scale = problem.vocab, problem.options.logit_scale
    grad_TV = torch.zeros_like(problem.logits_TV) if wanted[0] else None
    with torch.autocast(problem.logits_TV.device.type, enabled=False):
        for chunk in _logits_chunks(problem, work):
            run.keep(chunk)
            if grad_TV is not None:
                weighted = chunk.weighted(chunk.loss.coefficients, weight_T)
                grad_CV = chunk_source(work, problem.shard, chunk, weighted, through_softcap=True)
                grad_TV[chunk.tokens, :vocab] = grad_CV if scale == 1 else grad_CV.mul_(scale)
    run.gradients = (grad_TV,)
    return run


def _logits_chunks(problem: LogitsProblem, work: RowWork) -> Iterator[Chunk]:
    """Statistics and coefficients chunk by chunk. Rows are copied to a buffer, which is reused."""
    options, targets, shard = problem.options, problem.targets, problem.shard
    plan, vocab = problem.plan, problem.vocab
    head = None
    if problem.weight_VD is not None and plan.gain:
        head = HeadProducts(problem.weight_VD[:vocab], problem.dtype, None, problem.products)
    mean_row_D = shard.mean(head.mean()) if head is not None and plan.gain_centered else None
    token_bytes = shard.widest * problem.dtype.itemsize * work.buffers
    bounds = options.chunk_bounds(problem.logits_TV.shape[0], token_bytes, problem.products.device_type)
    longest = max((stop - start for start, stop in bounds), default=0)
    buffers_BCV = problem.logits_TV.new_empty((work.buffers, longest, vocab), dtype=problem.dtype)
    for start, stop in bounds:
        tokens = slice(start, stop)
        valid_C = targets.valid_T[tokens]
        index_C, has_target_C = shard.local_targets(targets.index_T[tokens])
        z_CV = buffers_BCV[0, : stop - start].copy_(problem.logits_TV.detach()[tokens, :vocab])
        if options.logit_scale != 1:
            z_CV.mul_(options.logit_scale)
        rows = row_pass(
            work,
            buffers_BCV[:, : stop - start],
            None,
            index_C,
            norm=plan.p_norm,
            mean=plan.mu or options.uses_mean,
            drop=plan.entropy,
        )
        sums, share = join_rows(shard, rows.sums, has_target_C, drop=plan.entropy)
        projected_CD = None
        if head is not None:
            projected_CD = head.back_project(product_exp(rows.e_CV, problem.products))
            if not shard.whole:
                projected_CD = shard.sum_(share.scaled(projected_CD))
        mean_C = sums.mean_logit_C
        stats = chunk_stats(
            plan,
            sums,
            valid_C,
            shard.total,
            mu_C=mean_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=options.logit_scale,
        )
        check_mean(mean_C, valid_C, options)
        # Under softcap the mean is not a coordinate and stays out of the record, but label smoothing uses it.
        loss = token_loss(replace(stats, mu=mean_C), options.objective, options.label_smoothing)
        yield Chunk(tokens, index_C, rows, sums, share, stats, loss)


def chunk_source(
    work: RowWork, shard: VocabularyShard, chunk: Chunk, coefficients: Coefficients, *, through_softcap: bool
) -> Tensor:
    """The source with these weighted coefficients at the local rows of the vocabulary, [C, rows]; the rows of the chunk
    are consumed."""
    if not shard.rows:
        return chunk.rows.buffer_CV
    valid_C = chunk.stats.valid
    if not shard.whole:
        # If every local logit is -inf, there is no E and no source.
        valid_C = valid_C & ~torch.isneginf(chunk.rows.sums.row_max_C)
        if coefficients.g is not None:  # row work divides g by the local rows, so it gets their share of V
            coefficients = replace(coefficients, g=coefficients.g * (shard.rows / shard.total))
    local = chunk.share.local(coefficients)
    return work.source(chunk.rows, chunk.index_C, valid_C, local, through_softcap=through_softcap)
