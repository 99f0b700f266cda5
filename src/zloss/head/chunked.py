"""The chunked losses: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of C tokens: logits → row sums and E = exp(z − m) → statistics → the objective's coefficients (a, b, g) →
gradients. From hidden states that takes three matrix products, h Wᵀ, E W (for dh and the gain) and Eᵀ(s∘h) (for dW):

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass. For reduction="none" the backward pass recomputes every chunk, because the per-token
upstream gradients are only known then.

What is done to a chunk of logits between the products is a `RowWork`: PyTorch (`rows.py`), or Triton kernels.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width, B buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zloss.errors import DoubleBackwardError, InputError
from zloss.head.arguments import (
    HeadProblem,
    LogitsProblem,
    LossParts,
    Targets,
    added_to_main_grad,
    check_mean,
    is_main_grad,
    require_unit_upstream,
)
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
from zloss.head.sharded import (
    RankShare,
    TokenChunk,
    VocabularyShard,
    join_rows,
    token_spans,
    with_hidden,
)
from zloss.objectives import Coefficients, TokenLoss, token_loss
from zloss.statistics import StatisticsPlan, TokenStats


def chunked_head_loss(problem: HeadProblem, work: RowWork | None = None) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias."""
    work = TorchRows(problem.options.softcap, plan=problem.products) if work is None else work
    rest = problem.without_operands()

    def run(operands: Operands, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
        hidden_TD, weight_VD, bias_V = operands
        assert hidden_TD is not None
        assert weight_VD is not None
        return run_head_chunks(rest.with_operands(hidden_TD, weight_VD, bias_V), work, wanted, weight_T)

    return _chunked_loss(
        problem.operands,
        problem.targets,
        problem.shard.total,
        run,
        grad_enabled=problem.grad_enabled,
        into_buffer=problem.weight_grad_buffer is not None,
        into_main_grad=is_main_grad(problem.weight_grad_buffer, problem.weight_VD),
    )


def chunked_logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss in chunks, with gradient to the logits, which are never overwritten."""
    rest = problem.with_logits(problem.logits_TV.new_empty(0))

    def run(operands: Operands, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
        (logits_TV,) = operands
        assert logits_TV is not None
        return _run_logits_chunks(rest.with_logits(logits_TV), wanted[0], weight_T)

    return _chunked_loss(
        (problem.logits_TV,), problem.targets, problem.shard.total, run, grad_enabled=problem.grad_enabled
    )


# --- autograd -----------------------------------------------------------------------------------------------------------


class ChunkedRun:
    """What a pass over all chunks leaves: values and statistics per token, gradients of Σ_t weight_t·ℓ_t."""

    def __init__(self, targets: Targets, plan: StatisticsPlan) -> None:
        like, tokens = targets.weight_T, targets.index_T.shape[0]
        self.cross_entropy_T = like.new_zeros(tokens)
        self.auxiliary_T = like.new_zeros(tokens)
        self.stats = {name: like.new_zeros(tokens) for name in plan.present}
        self.gradients: tuple[Tensor | None, ...] = ()
        """One per operand of the loss; None if it is not wanted."""

    def keep(self, chunk: Chunk) -> None:
        """Copy the values and statistics of a chunk to their tokens."""
        self.cross_entropy_T[chunk.tokens] = chunk.loss.cross_entropy
        self.auxiliary_T[chunk.tokens] = chunk.loss.auxiliary
        for name, value_T in self.stats.items():
            value_T[chunk.tokens] = getattr(chunk.stats, name)

    def value(self, targets: Targets) -> Tensor:
        return targets.reduced(self.cross_entropy_T + self.auxiliary_T)

    def parts(self, loss: Tensor, targets: Targets, vocab: int) -> LossParts:
        stats = TokenStats(valid=targets.valid_T, vocab=vocab, **self.stats)
        return loss, targets.reduced(self.cross_entropy_T), targets.reduced(self.auxiliary_T), stats


Operands = tuple[Tensor | None, ...]
Run = Callable[[Operands, tuple[bool, ...], Tensor], ChunkedRun]
"""(operands, which gradients are wanted, weight of every token) → one pass over all chunks."""


def _chunked_loss(
    operands: Operands,
    targets: Targets,
    vocab: int,
    run: Run,
    *,
    grad_enabled: bool,
    into_buffer: bool = False,
    into_main_grad: bool = False,
) -> LossParts:
    """The loss as a differentiable function of its operands. `run` must not hold the operands: autograd keeps them.

    `into_buffer`: `run` adds a gradient to a buffer of the caller, so it must run once, with the true weights.
    `into_main_grad`: that buffer is the `main_grad` of the second operand, a parameter of Megatron.
    """
    box: list[ChunkedRun] = []
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        run, targets, grad_enabled, into_buffer, into_main_grad, box, *operands
    )
    return box[0].parts(loss, targets, vocab)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        targets: Targets,
        grad_enabled: bool,
        into_buffer: bool,
        into_main_grad: bool,
        box: list[ChunkedRun],
        *operands: Tensor | None,
    ) -> Tensor:
        scalar = targets.reduction != "none"
        wanted = wanted_gradients(operands, grad_enabled=grad_enabled and scalar)
        done = run(operands, wanted, targets.weight_T)
        box.append(done)
        # Handed out once, so that the receiver may change them in place; a second backward recomputes them.
        ctx.ready = []
        if any(wanted):
            ctx.ready.append([narrow(grad, like) for grad, like in zip(done.gradients, operands, strict=True)])
        done.gradients = ()
        # The operands go through save_for_backward, where checkpointing and version checks see them.
        ctx.save_for_backward(*operands)
        ctx.run, ctx.targets = run, targets
        ctx.once = into_buffer and scalar
        # Kept apart, because Megatron reads attributes of the parameter, which a saved tensor need not have.
        ctx.megatron_weight = operands[1] if into_main_grad else None
        return done.value(targets)

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
            weight_T = ctx.targets.weight_T * upstream
            grads = list(ctx.run(ctx.saved_tensors, ctx.needs_input_grad[6:], weight_T).gradients)
        if ctx.megatron_weight is not None:
            grads[1] = added_to_main_grad(ctx.megatron_weight)
        return None, None, None, None, None, None, *grads


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

    def source(self, coefficients: Coefficients, weight_T: Tensor) -> Coefficients:
        """Coefficients of E, weighted by `weight_T` (reduction and upstream gradient)."""
        return coefficients.weighted(weight_T[self.tokens], self.stats.valid, self.sums.sum_C)


@dataclass(frozen=True)
class HeadChunk(Chunk):
    """A chunk of logits that came from hidden states and the head."""

    hidden_CD: Tensor
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """exp(z − m) W, unnormalised; the local E W if `partial`."""
    target_rows_CD: Tensor | None
    """W[y], where a sum over ranks was needed to have it on each."""
    partial: bool
    """Whether E W and W[y] are of local rows alone, so that dh still has to be summed over ranks."""
    mean_row_D: Tensor | None
    """w̄."""
    part: TokenChunk | None
    """Which rank has which tokens, if every rank holds some of them."""


def run_head_chunks(problem: HeadProblem, work: RowWork, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients (hidden, weight, bias) of Σ_t weight_t·(CE_t + aux_t)."""
    run = ChunkedRun(problem.targets, problem.plan)
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
    head, bias_V = HeadProducts.of(problem), problem.scaled_bias()
    mean_row_D, mean_bias = _means(problem, head, bias_V) if plan.mu else (None, None)
    # The entropy normally comes from E W. It needs its own pass over E if there is no mean, if a bias meets a 16-bit E (E·b
    # would lose digits), or on a shard (E W covers local rows only).
    drop = plan.entropy and (not plan.mu or (bias_V is not None and products.narrow) or not shard.whole)
    partial = not (shard.whole or plan.gain)

    token_bytes = shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow)
    bounds = options.chunk_bounds(targets.index_T.shape[0], token_bytes, products.device_type)
    spans = token_spans(problem.tokens, bounds)
    longest = max([span.length for span in spans], default=0)
    buffers_BCV = empty_rows(work.buffers, longest, problem.vocab, problem.dtype, products, problem.hidden_TD)
    narrow_CV = empty_narrow(products, longest, problem.vocab, problem.hidden_TD)

    for span, operand_CD in with_hidden(spans, problem.hidden_TD.detach()):
        valid_C = targets.valid_T[span.tokens]
        index_C, has_target_C = shard.local_targets(targets.index_T[span.tokens])

        # Product 1, h Wᵀ: the logits, in the first buffer. The row pass then overwrites them with E.
        hidden_CD = _logits_(problem, head, operand_CD, bias_V, buffers_BCV[0, : span.length])
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
            projected_CD = head.back_project(rows.e_CV)
            if not shard.whole and not partial:
                projected_CD, target_rows_CD = _sum_over_ranks(
                    shard, head, share, projected_CD, index_C, with_target_rows=back_projection
                )

        mu_C = energy_C = None
        if mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if mean_bias is None else mu_C + mean_bias
        if plan.entropy and sums.drop_C is None:
            assert projected_CD is not None
            assert mean_row_D is not None
            energy_C = mean_energy(rows.sums.sum_C, rows.e_CV, hidden_CD, projected_CD, mean_row_D, bias_V, mean_bias)
        stats = chunk_stats(
            plan,
            sums,
            valid_C,
            shard.total,
            mu_C=mu_C,
            mean_energy_C=energy_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=options.logit_scale,
        )
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
            partial=partial,
            mean_row_D=mean_row_D,
            part=span.part,
        )


def _means(problem: HeadProblem, head: HeadProducts, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """w̄ and the mean of s·b over the whole vocabulary."""
    if bias_V is None:
        return problem.shard.mean(head.mean()), None
    means = problem.shard.mean(torch.cat([head.mean(), bias_V.mean(dim=0, keepdim=True)]))
    return means[:-1], means[-1]


def _logits_(
    problem: HeadProblem, head: HeadProducts, operand_CD: Tensor, bias_V: Tensor | None, out_CV: Tensor
) -> Tensor:
    """out = s(W u + b) before the softcap; returns s·u in compute precision."""
    scale = problem.options.logit_scale
    if problem.rounding is not None:
        operand_CD = operand_CD.to(problem.rounding)
    hidden_CD = operand_CD.to(problem.dtype)
    if scale != 1:
        hidden_CD = hidden_CD * scale
    if problem.products.native:
        head.logits_(operand_CD, out_CV)
        if scale != 1:
            out_CV.mul_(scale)
    else:
        head.logits_(hidden_CD, out_CV)
    if bias_V is not None:
        out_CV.add_(bias_V)
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
        self._pending: list[Any] = []
        """Sums of dh over ranks in flight."""

    def add(self, chunk: HeadChunk) -> None:
        """Add the gradients of a chunk; its E W is consumed."""
        source = chunk.source(chunk.loss.source, self._weight_T)
        if chunk.target_slope_C is not None:
            assert source.b is not None
            b_C = torch.where(chunk.stats.valid, source.b * chunk.target_slope_C, source.b.new_zeros(()))
            source = replace(source, b=b_C)
        local = chunk.share.local(source)
        if self._hidden_TD is not None:
            if chunk.partial:
                shared = local if self._problem.shard.adds_shared_terms else replace(local, g=None)
                self._add_partial(chunk, self._hidden_gradient(chunk, shared), self._hidden_TD)
            elif chunk.part is None:
                self._hidden_TD[chunk.tokens] = self._hidden_gradient(chunk, source)
            else:
                grad_CD = self._hidden_gradient(chunk, source)
                self._hidden_TD[chunk.part.local_rows] = grad_CD[chunk.part.local_in_chunk]
        if self._weight is not None:
            self._weight.add(chunk, local)
        if self._bias is not None:
            self._bias.add(chunk, local)

    def _hidden_gradient(self, chunk: HeadChunk, source: Coefficients) -> Tensor:
        """w (a·Wᵀp − b·W[y] − g·w̄); the E W of the chunk is consumed."""
        assert chunk.projected_CD is not None
        assert source.b is not None
        grad_CD = chunk.projected_CD.mul_(source.a.unsqueeze(1))
        target_rows_CD = chunk.target_rows_CD
        if target_rows_CD is None and self._problem.vocab:
            target_rows_CD = self._head.select(chunk.index_C)
        if target_rows_CD is not None:
            grad_CD.addcmul_(target_rows_CD, source.b.unsqueeze(1), value=-1)
        if source.g is not None:
            assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
            grad_CD.addr_(source.g, chunk.mean_row_D, alpha=-1)
        return grad_CD

    def _add_partial(self, chunk: HeadChunk, local_CD: Tensor, hidden_TD: Tensor) -> None:
        """Sum dh over ranks, in parallel with the products of this chunk's dW and of the next chunk."""
        if chunk.part is None:
            place_CD = hidden_TD[chunk.tokens]
            place_CD.copy_(local_CD)
            self._pending.append(self._problem.shard.start_sum_(place_CD))
            return
        while self._pending:  # each of these sums has a buffer: one at a time
            self._pending.pop().wait()
        self._pending.append(chunk.part.start_scatter(local_CD, hidden_TD))

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk; no dW if it went to the caller's buffer."""
        for pending in self._pending:
            pending.wait()
        weight_VD = None if self._weight is None else self._weight.finish()
        bias_V = None if self._bias is None else self._bias.finish()
        scale = self._problem.options.logit_scale
        if self._hidden_TD is not None and scale != 1:
            self._hidden_TD.mul_(scale)
        return self._hidden_TD, weight_VD, bias_V


# --- from logits --------------------------------------------------------------------------------------------------------


def _run_logits_chunks(problem: LogitsProblem, wanted: bool, weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the gradient of Σ_t weight_t·(CE_t + aux_t) in the dtype of the logits."""
    run = ChunkedRun(problem.targets, problem.plan)
    work = TorchRows(problem.options.softcap, keep_slope=wanted)
    vocab, scale = problem.vocab, problem.options.logit_scale
    grad_TV = torch.zeros_like(problem.logits_TV) if wanted else None
    with torch.autocast(problem.logits_TV.device.type, enabled=False):
        for chunk in _logits_chunks(problem, work):
            run.keep(chunk)
            if grad_TV is not None:
                source = chunk.source(chunk.loss.source, weight_T)
                grad_CV = chunk_source(work, problem.shard, chunk, source, through_softcap=True)
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
    work: RowWork, shard: VocabularyShard, chunk: Chunk, source: Coefficients, *, through_softcap: bool
) -> Tensor:
    """A source of the whole vocabulary on the local rows, [C, rows]; the rows of the chunk are consumed."""
    if not shard.rows:
        return chunk.rows.source_CV
    valid_C = chunk.stats.valid
    if not shard.whole:
        # If every local logit is -inf, there is no E and no source.
        valid_C = valid_C & ~torch.isneginf(chunk.rows.sums.row_max_C)
        if source.g is not None:  # row work divides g by the local rows, so it gets their share of V
            source = replace(source, g=source.g * (shard.rows / shard.total))
    local = chunk.share.local(source)
    return work.source(chunk.rows, chunk.index_C, valid_C, local, through_softcap=through_softcap)
