"""The chunked losses: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of C tokens: logits → row sums and E = exp(z − m) → statistics → the objective's coefficients (a, b, g) →
gradients. From hidden states that takes three matrix products, h Wᵀ, E W (for dh and the gain) and Eᵀ(w·a/S∘h) (for dW):

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass. For reduction="none" the backward pass recomputes every chunk, because the per-token
upstream gradients are only known then. dh, dW and db are summed by `HeadGradients` (`products.py`).

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
from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, LossProblem, check_mean, check_rows
from zloss.head.products import HeadGradients, HeadProducts, product_exp
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
    at_tokens,
    join_row_sums,
    token_spans,
    with_hidden,
)
from zloss.objectives import Coefficients, Part, TokenLoss, token_loss
from zloss.statistics import TokenStats
from zloss.tensors import without_autocast


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
        self._targets, self._vocab, self._names = problem.targets, problem.shard.total, problem.plan.present
        self._chunks: list[tuple[slice | Tensor, Tensor, Tensor, TokenStats]] = []
        """Tokens, cross-entropy, auxiliary and statistics of every chunk; after `join` of all of them as one."""
        self._check_rows = False
        self.gradients: tuple[Tensor | None, ...] = ()
        """One per operand of the loss; None if it is not wanted."""

    def keep(self, chunk: Chunk) -> None:
        """Keep the values and statistics of a chunk."""
        cross_entropy_C, auxiliary_C = chunk.loss.cross_entropy, chunk.loss.auxiliary
        if auxiliary_C.shape != cross_entropy_C.shape or auxiliary_C.dtype != cross_entropy_C.dtype:
            # A registered objective may return one number for all tokens.
            auxiliary_C = auxiliary_C.to(cross_entropy_C).expand_as(cross_entropy_C)
        self._check_rows |= not chunk.rows.all_have_exp
        self._chunks.append((chunk.tokens, cross_entropy_C, auxiliary_C, chunk.stats))

    def join(self) -> None:
        """The chunks as one, whose tokens are in order; called after the last chunk."""
        if len(self._chunks) == 1 and isinstance(self._chunks[0][0], slice):
            return
        columns = [[ce, aux, *(getattr(stats, name) for name in self._names)] for _, ce, aux, stats in self._chunks]
        joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
        if not joined:
            empty = self._targets.weight_T.new_zeros(0)
            joined = [empty, empty, *(empty.long() if name == "predicted" else empty for name in self._names)]
        indices = [tokens for tokens, *_ in self._chunks if isinstance(tokens, Tensor)]
        if indices:
            order_T = torch.cat(indices).argsort()
            joined = [column_T[order_T] for column_T in joined]
        cross_entropy_T, auxiliary_T, *found = joined
        statistics = dict(zip(self._names, found, strict=True))
        stats = TokenStats(valid=self._targets.valid_T, vocab=self._vocab, **statistics)
        self._chunks = [(slice(None), cross_entropy_T, auxiliary_T, stats)]

    def value(self) -> Tensor:
        """The loss without its gradient."""
        [(_, cross_entropy_T, auxiliary_T, _)] = self._chunks
        return self._targets.reduced(cross_entropy_T + auxiliary_T)

    def parts(self, loss: Tensor) -> LossParts:
        """What a backend returns; `loss` is `value()` with its gradient."""
        [(_, cross_entropy_T, auxiliary_T, stats)] = self._chunks
        if self._check_rows:
            check_rows(stats)
        return loss, self._targets.reduced(cross_entropy_T), self._targets.reduced(auxiliary_T), stats


Problem = TypeVar("Problem", bound=LossProblem)
Run = Callable[[Problem, tuple[bool, ...], Tensor], ChunkedRun]
"""(problem, which gradients are wanted, weight of every token) → one pass over all chunks."""


def _chunked_loss(problem: Problem, run: Run[Problem]) -> LossParts:
    """The loss as a differentiable function of its operands."""
    operands, weight_T = problem.operands, problem.targets.weight_T
    if torch.compiler.is_compiling():
        return _traced_loss(problem, run)
    if torch._C._are_functorch_transforms_active():
        raise InputError(
            "this backend forms its gradients itself, which the transforms of torch.func (grad, vmap, jvp, …) cannot follow: "
            "use backend='dense' with them."
        )
    wanted = wanted_gradients(operands, grad_enabled=torch.is_grad_enabled() and problem.targets.reduction != "none")
    with torch.no_grad():
        result = run(problem, wanted, weight_T)
    # The operands are kept by autograd itself, where checkpointing and version checks see them.
    rest = _with_own_coefficients(problem.with_operands([None] * len(operands)))
    return result.parts(_WithGradients.apply(result, wanted, run, rest, *operands))  # type: ignore[no-untyped-call]


def _with_own_coefficients(problem: Problem) -> Problem:
    """The problem with copies of tensor coefficients: a backward pass that recomputes must find the values of the forward."""
    objective = problem.options.objective
    own = {name: coef.clone() for name, coef in objective.coefficients().items() if isinstance(coef, Tensor)}
    if not own:
        return problem
    return replace(problem, options=replace(problem.options, objective=replace(objective, **own)))  # type: ignore[type-var]


def _traced_loss(problem: Problem, run: Run[Problem]) -> LossParts:
    """The same in a compiled or exported graph, where an op attaches the gradients that the pass has formed.

    Per-token losses are those of logits, whose gradient at a token is in proportion to its upstream gradient. What will
    require a gradient in an exported graph is not known, so all gradients are formed there.
    """
    operands = problem.operands
    wanted = wanted_gradients(operands, grad_enabled=torch.is_grad_enabled())
    if torch.compiler.is_exporting() and torch.is_grad_enabled():
        wanted = tuple(operand is not None for operand in operands)
    with torch.no_grad():
        result = run(problem, wanted, problem.targets.weight_T)
        loss = result.value()
    for grad, operand in zip(result.gradients, operands, strict=True):
        if grad is not None and operand is not None:
            loss = with_gradient(loss, operand, stored_gradient(grad, operand))
    return result.parts(loss)


@torch.library.custom_op("zloss::with_gradient", mutates_args=())
def with_gradient(value: Tensor, operand: Tensor, grad: Tensor) -> Tensor:
    """`value`, one number or one per token, as a function of `operand` too, whose gradient is known already."""
    return value.clone()


with_gradient.register_fake(lambda value, operand, grad: torch.empty_like(value))


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.dtype = inputs[1].dtype


def _scaled_gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    refuse_double_backward()
    (grad,) = ctx.saved_tensors
    factor = upstream if upstream.dim() == 0 else upstream.unsqueeze(1)
    return upstream, (grad * factor).to(ctx.dtype), None


with_gradient.register_autograd(_scaled_gradient, setup_context=_keep_gradient)


class _WithGradients(torch.autograd.Function):
    """The value of a pass over all chunks, as a function of the operands whose gradients the pass has formed."""

    @staticmethod
    def forward(
        ctx: Any,
        result: ChunkedRun,
        wanted: tuple[bool, ...],
        run: Run[Any],
        problem: LossProblem,
        *operands: Tensor | None,
    ) -> Tensor:
        # Handed out once, so that the receiver may change them in place; a second backward recomputes them.
        ctx.ready = []
        if any(wanted):
            ctx.ready.append(
                [stored_gradient(grad, like) for grad, like in zip(result.gradients, operands, strict=True)]
            )
        result.gradients = ()
        ctx.save_for_backward(*operands)
        ctx.run, ctx.problem = run, problem
        # Kept in addition, because Megatron reads attributes of the parameter, which a saved tensor need not have.
        buffer = problem.weight_grad_buffer
        ctx.megatron_weight = operands[1] if buffer is not None and _is_main_grad(buffer, operands[1]) else None
        return result.value()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        targets = ctx.problem.targets
        if ctx.problem.weight_grad_buffer is not None and targets.reduction != "none":
            _require_first_unit_backward(upstream, first=bool(ctx.ready))
        if ctx.ready:
            # On the CPU reading the upstream scalar costs nothing, and a factor of 1 saves a pass over every gradient.
            unit = upstream.device.type == "cpu" and float(upstream) == 1.0
            grads = [grad if grad is None or unit else grad.mul_(upstream) for grad in ctx.ready.pop()]
        else:
            problem = ctx.problem.with_operands(ctx.saved_tensors)
            grads = list(ctx.run(problem, ctx.needs_input_grad[4:], targets.weight_T * upstream).gradients)
        if ctx.megatron_weight is not None:
            grads[1] = _added_to_main_grad(ctx.megatron_weight)
        return None, None, None, None, *grads


def wanted_gradients(operands: tuple[Tensor | None, ...], *, grad_enabled: bool) -> tuple[bool, ...]:
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


def _require_first_unit_backward(upstream: Tensor, *, first: bool) -> None:
    """Refuse a second backward pass, or one whose upstream gradient is not 1: dW is in the buffer already."""
    if upstream.device.type != "cpu":
        # Checked on the device: reading the value here would stall the stream.
        torch._assert_async(upstream == 1, "with `weight_grad_buffer` the upstream gradient must be 1")
    elif float(upstream) != 1.0:
        raise InputError(
            f"with `weight_grad_buffer` the upstream gradient of the loss is expected to be 1, but got "
            f"{float(upstream)!r}: dW was added in the forward pass. Put factors into `normalizer` or `token_weight`."
        )
    if not first:
        raise InputError("backward ran twice, but `weight_grad_buffer` takes dW once per call of the loss.")


def _is_main_grad(buffer: Tensor, weight: Tensor | None) -> bool:
    """Whether `weight` is a parameter under Megatron's data parallelism and `buffer` its `main_grad`."""
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor) or not hasattr(weight, "grad_added_to_main_grad"):
        return False
    return main_grad.data_ptr() == buffer.data_ptr()


def _added_to_main_grad(weight: Any) -> Tensor | None:
    """Called in the backward pass: tell Megatron that dW is in `main_grad`, and return what autograd gets instead.

    Megatron discards the gradient that autograd has for `weight`, unless `weight.zero_out_wgrad` is set. With a second use
    of the weight, such as a tied embedding, that gradient is more than our zeros.
    """
    weight.grad_added_to_main_grad = True
    task = torch._C._current_graph_task_id()
    if getattr(weight, "_zloss_backward", None) == task:  # another loss of this backward pass has returned zeros
        return None
    weight._zloss_backward = task
    if not getattr(weight, "zero_out_wgrad", False):

        def refuse_more_than_zeros(grad: Tensor) -> None:
            hook.remove()
            if any(grad.stride()):  # a sum: the zeros below have no strides
                raise InputError(
                    "`weight` also gets a gradient from another use, such as a tied embedding, which Megatron discards "
                    "when dW is in `main_grad`: set `weight.zero_out_wgrad = True`, as Megatron does for shared embeddings."
                )

        hook = weight.register_hook(refuse_more_than_zeros)
    zeros: Tensor = weight.new_zeros(()).expand_as(weight)
    return zeros


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
    counted_C: Tensor | None
    """Which tokens count; None if all do."""

    def weighted(self, weight_T: Tensor, part: Part = "total") -> Coefficients:
        """The coefficients of E and onehot(y), weighted by `weight_T` (reduction and upstream gradient)."""
        return self.loss.weighted(at_tokens(weight_T, self.tokens), self.counted_C, self.sums.sum_C, part)


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
    # Operands are already rounded to the autocast dtype; from there on nothing may be rounded again.
    with without_autocast(problem.products.device_type):
        head, through_source = HeadProducts.of(problem), problem.through_source
        if work is None:
            work = TorchRows(problem.options.softcap, plan=problem.products, keep_slope=through_source and any(wanted))
        gradients = HeadGradients(problem, head, wanted, weight_T) if any(wanted) else None
        chunk: HeadChunk | None = None
        for chunk in head_chunks(problem, back_projection=wanted[0] and not through_source, work=work, head=head):
            run.keep(chunk)
            if gradients is not None and through_source:
                source_CV = chunk_source(work, problem.shard, chunk, chunk.weighted(weight_T), through_softcap=True)
                gradients.add_source(chunk, source_CV)
            elif gradients is not None:
                gradients.add(chunk)
        run.join()
        del chunk  # frees the V-wide buffers before a gradient is copied to 16 bits
        run.gradients = (None, None, None) if gradients is None else gradients.finish()
    return run


def head_chunks(
    problem: HeadProblem, *, back_projection: bool, work: RowWork | None = None, head: HeadProducts | None = None
) -> Iterator[HeadChunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next.

    E W is formed if `back_projection` requests it or the plan has the gain.
    """
    options, targets, shard = problem.options, problem.targets, problem.shard
    plan, products, scale = problem.plan, problem.products, options.logit_scale
    work = TorchRows(options.softcap, plan=products) if work is None else work
    head = HeadProducts.of(problem) if head is None else head
    bias_V = problem.scaled_bias()
    mean_row_D = mean_bias = None
    if plan.mu and bias_V is None:
        mean_row_D = shard.mean(head.mean())
    elif plan.mu and bias_V is not None:
        means = shard.mean(torch.cat([head.mean(), bias_V.mean(dim=0, keepdim=True)]))
        mean_row_D, mean_bias = means[:-1], means[-1]
    # The entropy comes from E W, except if there is no mean, if a bias meets a 16-bit E (E·b would lose digits), or on a
    # shard (E W covers local rows only): then it takes a pass over E.
    drop = plan.entropy and (not plan.mu or (bias_V is not None and products.narrow) or not shard.whole)

    token_bytes = shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow)
    bounds = options.chunk_bounds(targets.index_T.shape[0], token_bytes, products.device_type)
    spans = token_spans(problem.tokens, bounds)
    longest = spans[0][1] if spans else 0
    buffers_BCV = empty_rows(work.buffers, longest, problem.vocab, problem.dtype, products, problem.hidden_TD)
    narrow_CV = empty_narrow(products, longest, problem.vocab, problem.hidden_TD)

    for (tokens, length, token_chunk), operand_CD in with_hidden(spans, problem.hidden_TD.detach()):
        index_C, has_target_C = shard.local_targets(at_tokens(targets.index_T, tokens))
        chunk_BCV = buffers_BCV if length == longest else buffers_BCV[:, :length]

        # Product 1, h Wᵀ: the logits s(W u + b), in the first buffer. The row pass then overwrites them with E.
        z_CV = chunk_BCV[0]
        if problem.rounding is not None:
            operand_CD = operand_CD.to(problem.rounding)
        hidden_CD = operand_CD.to(problem.dtype)
        if scale != 1:
            hidden_CD = hidden_CD * scale
        head.logits_(operand_CD if products.takes_16_bit else hidden_CD, z_CV)
        if products.takes_16_bit and scale != 1:
            z_CV.mul_(scale)
        if bias_V is not None:
            z_CV.add_(bias_V)
        rows = row_pass(
            work,
            chunk_BCV,
            None if narrow_CV is None else narrow_CV[:length],
            index_C,
            norm=plan.p_norm,
            mean=plan.mu_residual or problem.through_source,
            drop=drop,
            argmax=plan.predicted,
        )
        sums, share = join_row_sums(shard, rows.sums, has_target_C, drop=drop, argmax=plan.predicted)

        # Product 2, E W = S·Wᵀp: for the gain and for dh. Product 3, Eᵀ(s∘h), is that of dW (`HeadGradients`).
        projected_CD = target_rows_CD = None
        if back_projection or plan.gain:
            projected_CD = head.back_project(rows.e_CV)
            if not shard.whole and not problem.partial_projection:
                projected_CD, target_rows_CD = _sum_over_ranks(
                    shard, head, share, projected_CD, index_C, with_target_rows=back_projection
                )

        mu_C = energy_C = None  # μ = w̄·u + b̄ is from the means of the head and not from the logits
        if mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if mean_bias is None else mu_C + mean_bias
        if plan.entropy and sums.drop_C is None:  # the Triton kernels always have it
            assert projected_CD is not None
            assert mean_row_D is not None
            energy_C = mean_energy(sums.sum_C, rows.e_CV, hidden_CD, projected_CD, mean_row_D, bias_V, mean_bias)
        valid_C = at_tokens(targets.valid_T, tokens)
        stats = chunk_stats(
            plan,
            sums,
            valid_C,
            shard.total,
            all_valid=targets.all_valid,
            mu_C=mu_C,
            mean_energy_C=energy_C,
            projected_CD=projected_CD,
            mean_row_D=mean_row_D,
            logit_scale=scale,
        )
        # Under softcap the mean is not a coordinate and stays out of the record, but label smoothing uses it.
        smoothed = replace(stats, mu=sums.mean_logit_C) if problem.through_source else stats
        yield HeadChunk(
            tokens=tokens,
            index_C=index_C,
            rows=rows,
            sums=sums,
            share=share,
            stats=stats,
            loss=token_loss(smoothed, options.objective, options.label_smoothing),
            counted_C=None if targets.all_valid else valid_C,
            hidden_CD=hidden_CD,
            target_slope_C=None if options.softcap is None else softcap_slope(sums.target_logit_C, options.softcap),
            projected_CD=projected_CD,
            target_rows_CD=target_rows_CD,
            mean_row_D=mean_row_D,
            token_chunk=token_chunk,
        )


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
    picked_CD = torch.zeros_like(local_CD)
    if shard.rows and share.has_target_C is not None:
        picked_CD = torch.where(share.has_target_C.unsqueeze(1), head.select(index_C), picked_CD)
    both_CX = shard.sum_(torch.cat([local_CD, picked_CD], dim=1))
    return both_CX[:, :width].contiguous(), both_CX[:, width:]


# --- from logits --------------------------------------------------------------------------------------------------------


def _run_logits_chunks(problem: LogitsProblem, wanted: tuple[bool, ...], weight_T: Tensor) -> ChunkedRun:
    """One pass: values, statistics, and the gradient of Σ_t weight_t·(CE_t + aux_t) in the dtype of the logits."""
    options, targets, shard, plan = problem.options, problem.targets, problem.shard, problem.plan
    run, work = ChunkedRun(problem), TorchRows(options.softcap, keep_slope=wanted[0])
    logits_TV, vocab, scale = problem.logits_TV.detach(), problem.vocab, options.logit_scale
    grad_TV = torch.zeros_like(logits_TV) if wanted[0] else None
    token_bytes = shard.widest * problem.dtype.itemsize * work.buffers
    bounds = options.chunk_bounds(logits_TV.shape[0], token_bytes, problem.products.device_type)
    longest = bounds[0][1] if bounds else 0
    buffers_BCV = logits_TV.new_empty((work.buffers, longest, vocab), dtype=problem.dtype)
    with without_autocast(logits_TV.device.type):
        head = mean_row_D = projected_CD = None
        if problem.weight_VD is not None and plan.gain:
            head = HeadProducts(problem.weight_VD[:vocab], problem.dtype, None, problem.products)
            mean_row_D = shard.mean(head.mean()) if plan.gain_centered else None
        for start, stop in bounds:
            tokens = slice(start, stop)
            valid_C = at_tokens(targets.valid_T, tokens)
            index_C, has_target_C = shard.local_targets(at_tokens(targets.index_T, tokens))
            # Rows are copied to a buffer, which is reused: the caller's logits are never overwritten.
            z_CV = buffers_BCV[0, : stop - start].copy_(logits_TV[tokens, :vocab])
            if scale != 1:
                z_CV.mul_(scale)
            rows = row_pass(
                work,
                buffers_BCV[:, : stop - start],
                None,
                index_C,
                norm=plan.p_norm,
                mean=plan.mu or options.uses_mean,
                drop=plan.entropy,
                argmax=plan.predicted,
            )
            sums, share = join_row_sums(shard, rows.sums, has_target_C, drop=plan.entropy, argmax=plan.predicted)
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
                all_valid=targets.all_valid,
                mu_C=mean_C,
                projected_CD=projected_CD,
                mean_row_D=mean_row_D,
                logit_scale=scale,
            )
            check_mean(mean_C, valid_C, options)
            # Under softcap the mean is not a coordinate and stays out of the record, but label smoothing uses it.
            loss = token_loss(replace(stats, mu=mean_C), options.objective, options.label_smoothing)
            counted_C = None if targets.all_valid else valid_C
            chunk = Chunk(tokens, index_C, rows, sums, share, stats, loss, counted_C)
            run.keep(chunk)
            if grad_TV is not None:
                weighted = chunk.weighted(weight_T)
                grad_CV = chunk_source(work, shard, chunk, weighted, through_softcap=True)
                grad_TV[tokens, :vocab] = grad_CV if scale == 1 else grad_CV.mul_(scale)
    run.join()
    run.gradients = (grad_TV,)
    return run


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
