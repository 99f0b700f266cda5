"""The chunked losses: one [chunk, V] buffer, every objective at the cost of cross-entropy, on any device.

Per chunk of C tokens: logits → row sums and E = exp(z − m) → statistics → the objective's coefficients (a, b, g) →
gradients. From hidden states that takes three matrix products, h Wᵀ with h = s·u and the logit scale s, E W (for dh and the
gain) and Eᵀ(x∘h) with x = w·a/S (for dW):

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

For a scalar loss the gradients are formed in the forward pass, while a chunk's E is at hand, and multiplied by the one
upstream number in the backward pass; until then they stay in compute precision, because rounding comes last. For
reduction="none" the backward pass recomputes every chunk, because the per-token upstream gradients are only known then.
dh, dW and db are summed by `HeadGradients` (`products.py`).

The gradient of given logits is as large as they are. For reduction="none" and for 16-bit logits, whose gradient would take
twice their memory in compute precision, the backward pass forms it from the logits and the coefficients
(`logits_gradient.py`), with one more exp. On the CPU bf16 logits are spared it while the upstream gradient is a power of two.

What is done to a chunk of logits between the products is a `RowWork`: PyTorch (`rows.py`), or Triton kernels. The losses
of hidden states and of logits are in one module because they share the autograd function and the work on a chunk.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width, B buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, LossProblem, check_mean, check_rows
from zloss.head.logits_gradient import RowSource, refuse_double_backward, row_loss
from zloss.head.options import chunk_bounds
from zloss.head.products import HeadGradients, HeadProducts, ProductPlan, fp32_plan, product_exp
from zloss.head.rows import (
    RowNeeds,
    RowPass,
    RowSums,
    RowWork,
    TorchRows,
    chunk_stats,
    empty_rows,
    mean_energy,
    softcap_slope,
    statistics_of_no_rows,
)
from zloss.head.sharded import RankShare, VocabularyShard, join_row_sums
from zloss.objectives import Coefficients, Part, TokenLoss, token_loss
from zloss.statistics import TokenStats
from zloss.tensors import may_read, without_autocast


def chunked_loss(problem: HeadProblem | LogitsProblem, work: RowWork | None = None) -> LossParts:
    """The loss in chunks, with gradient to hidden states, weight and bias, or to the logits, which are never overwritten.

    `work` defaults to `TorchRows`.
    """
    operands, weight_T = problem.operands, problem.targets.weight_T
    compiling = torch.compiler.is_compiling()
    if not compiling and torch._C._are_functorch_transforms_active():
        raise InputError(
            "this backend computes its own gradients, which torch.func transforms (grad, vmap, jvp, …) do not support: "
            "use backend='dense' with them."
        )
    if isinstance(problem, LogitsProblem) and forms_gradient_late(problem):
        with torch.no_grad():
            result = run_chunks(problem, (False,), weight_T, work)
        assert result.source is not None
        return result.parts(loss_of_rows(problem, result.value(), result.source, triton=False))
    if compiling:
        return _traced_loss(problem, work)
    wanted = wanted_gradients(operands, grad_enabled=torch.is_grad_enabled() and problem.targets.reduction != "none")
    with torch.no_grad():
        result = run_chunks(problem, wanted, weight_T, work)
    loss = _WithGradients.apply(result, wanted, work, _for_backward(problem), *operands)  # type: ignore[no-untyped-call]
    return result.parts(loss)


# --- autograd -----------------------------------------------------------------------------------------------------------


@dataclass
class ChunkedRun:
    """What a pass over all chunks leaves: the two parts of the loss, reduced, statistics per token, and gradients."""

    cross_entropy: Tensor
    auxiliary: Tensor
    stats: TokenStats
    all_have_exp: bool
    """Every token is known to have a distribution, so `check_rows` can be skipped."""
    gradients: tuple[Tensor | None, ...]
    """Of Σ_t weight_t·ℓ_t, one per operand of the loss; None if it is not wanted."""
    source: RowSource | None
    """What forms the gradient of given logits in the backward pass; None if it is formed already."""

    def value(self) -> Tensor:
        """The loss without its gradient."""
        return self.cross_entropy + self.auxiliary

    def parts(self, loss: Tensor) -> LossParts:
        """What a backend returns; `loss` is `value()` with its gradient."""
        if not self.all_have_exp:
            check_rows(self.stats)
        return loss, self.cross_entropy, self.auxiliary, self.stats


def _for_backward(problem: LossProblem) -> LossProblem:
    """The problem without its operands, which autograd keeps itself, where checkpointing and version checks see them, and with
    copies of tensor coefficients: a backward pass that recomputes must see the values that the forward pass used."""
    objective = problem.options.objective
    own = {name: coef.clone() for name, coef in objective.coefficients().items() if isinstance(coef, Tensor)}
    if own:
        options = replace(problem.options, objective=replace(objective, **own))  # type: ignore[type-var]
        problem = replace(problem, options=options)
    return problem.with_operands([None] * len(problem.operand_names))


def _traced_loss(problem: HeadProblem | LogitsProblem, work: RowWork | None) -> LossParts:
    """`chunked_loss` in a compiled or exported graph, where a custom op attaches the gradients already computed.

    What will require a gradient in an exported graph is not known, so all gradients are formed there.
    """
    operands = problem.operands
    wanted = wanted_gradients(operands, grad_enabled=torch.is_grad_enabled())
    if torch.compiler.is_exporting() and torch.is_grad_enabled():
        wanted = tuple(operand is not None for operand in operands)
    with torch.no_grad():
        result = run_chunks(problem, wanted, problem.targets.weight_T, work)
        loss = result.value()
    for grad, operand in zip(result.gradients, operands, strict=True):
        if grad is not None and operand is not None:
            loss = with_gradient(loss, operand, grad)
    return result.parts(loss)


@torch.library.custom_op("zloss::with_gradient", mutates_args=())
def with_gradient(value: Tensor, operand: Tensor, grad: Tensor) -> Tensor:
    """`value`, one number, made differentiable in `operand`, with a gradient that is already known, in compute precision."""
    return value.clone()


with_gradient.register_fake(lambda value, operand, grad: torch.empty_like(value))


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.dtype = inputs[1].dtype


def _scaled_gradient(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    refuse_double_backward()
    (grad,) = ctx.saved_tensors
    return upstream, (grad * upstream).to(ctx.dtype), None


with_gradient.register_autograd(_scaled_gradient, setup_context=_keep_gradient)


class _WithGradients(torch.autograd.Function):
    """The value of a pass over all chunks, as a function of the operands whose gradients the pass has formed."""

    @staticmethod
    def forward(
        ctx: Any,
        result: ChunkedRun,
        wanted: tuple[bool, ...],
        work: RowWork | None,
        problem: HeadProblem | LogitsProblem,
        *operands: Tensor | None,
    ) -> Tensor:
        # Returned once, so that the caller may modify them in place; a second backward pass recomputes them.
        ctx.ready = [list(result.gradients)] if any(wanted) else []
        result.gradients = ()
        ctx.save_for_backward(*operands)
        ctx.work, ctx.problem = work, problem
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
        grads = ctx.ready.pop() if ctx.ready else None
        if grads is not None and _is_final(grads, upstream, ctx.problem.dtype):
            for i, operand in enumerate(ctx.saved_tensors):  # in place, so that one is freed before the next is copied
                if grads[i] is not None:
                    grads[i] = multiplied(grads[i], upstream, operand.dtype)
        else:
            problem = ctx.problem.with_operands(ctx.saved_tensors)
            weight_T = targets.weight_T * upstream
            grads = list(run_chunks(problem, ctx.needs_input_grad[4:], weight_T, ctx.work).gradients)
        if ctx.megatron_weight is not None:
            grads[1] = _added_to_main_grad(ctx.megatron_weight)
        return None, None, None, None, *grads


def wanted_gradients(operands: tuple[Tensor | None, ...], *, grad_enabled: bool) -> tuple[bool, ...]:
    return tuple(grad_enabled and operand is not None and operand.requires_grad for operand in operands)


def multiplied(grad: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """upstream·grad, rounded to `dtype` once; `grad` is consumed."""
    if upstream.device.type != "cpu":
        return torch.mul(grad, upstream, out=grad if grad.dtype == dtype else torch.empty_like(grad, dtype=dtype))
    # On the CPU reading the upstream scalar costs nothing, and a factor of 1 saves a pass over every gradient.
    return (grad if float(upstream) == 1.0 else grad.mul_(upstream)).to(dtype)


def forms_gradient_late(problem: LogitsProblem) -> bool:
    """Whether the gradient of given logits is formed in the backward pass alone.

    On the CPU that of bf16 logits is also formed in the forward pass, for an upstream gradient that is likely to be 1.
    """
    logits = problem.logits_TV
    if problem.targets.reduction == "none":
        return True
    return logits.dtype != problem.dtype and not (logits.dtype == torch.bfloat16 and may_read(logits))


def _is_final(grads: list[Tensor | None], upstream: Tensor, dtype: torch.dtype) -> bool:
    """Whether a multiple of these gradients needs no second rounding: they are in compute precision, or in bf16 and
    multiplied by a power of two."""
    if all(grad is None or grad.dtype == dtype for grad in grads):
        return True
    return abs(math.frexp(float(upstream))[0]) == 0.5


def loss_of_rows(problem: LogitsProblem, value: Tensor, source: RowSource, *, triton: bool) -> Tensor:
    """`value` with the gradient that `source` states at the logits."""
    options = problem.options
    shape = problem.local_rows, options.logit_scale, options.softcap, options.chunk_size, options.memory_budget
    loss: Tensor = row_loss(problem.logits_TV, value, *source, *shape, triton)
    return loss


def _require_first_unit_backward(upstream: Tensor, *, first: bool) -> None:
    """Reject a second backward pass, or one whose upstream gradient is not 1: dW is in the buffer already."""
    if upstream.device.type != "cpu":
        # Checked on the device: reading the value here would stall the stream.
        torch._assert_async(upstream == 1, "with `weight_grad_buffer`, the upstream gradient must be 1")
    elif float(upstream) != 1.0:
        raise InputError(
            f"with `weight_grad_buffer`, the upstream gradient of the loss is expected to be 1, but got "
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


# --- the chunks ---------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """The rows of a chunk with their statistics and coefficients. The buffers behind it are reused by the next one."""

    tokens: slice
    """Positions among all tokens."""
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
    """The valid tokens, `stats.valid`; None if all of them are."""
    hidden_CD: Tensor | None
    """s·u: the logit scale s is on the hidden states, which are narrower than the logits. None for given logits."""
    target_slope_C: Tensor | None
    """Slope of the softcap at the target; None without a softcap."""
    projected_CD: Tensor | None
    """exp(z − m) W, unnormalized; the E W of local rows if the problem's projection is partial."""
    target_rows_CD: Tensor | None
    """W[y], where a sum over ranks was needed to have it on each."""
    mean_row_D: Tensor | None
    """w̄."""

    def exp_coefficients(self, weight_T: Tensor, part: Part = "total") -> Coefficients:
        """The coefficients of E and onehot(y), weighted by `weight_T` (reduction and upstream gradient)."""
        return self.loss.exp_coefficients(at_tokens(weight_T, self.tokens), self.counted_C, self.sums.sum_C, part)


def at_tokens(x_T: Tensor, tokens: slice) -> Tensor:
    """The rows of x that belong to a chunk; x itself if those are all."""
    return x_T if tokens.start == 0 and tokens.stop == x_T.shape[0] else x_T[tokens]


def run_chunks(
    problem: HeadProblem | LogitsProblem, wanted: tuple[bool, ...], weight_T: Tensor, work: RowWork | None = None
) -> ChunkedRun:
    """One pass: values, statistics, and the wanted gradients, one per operand, of Σ_t weight_t·(CE_t + aux_t)."""
    through_source, scale = problem.through_source, problem.options.logit_scale
    kept: list[tuple[Tensor, Tensor, TokenStats]] = []
    sources: list[RowSource] | None = None
    if isinstance(problem, LogitsProblem) and forms_gradient_late(problem):
        sources = []
    scaled_T = weight_T if scale == 1 else scale * weight_T
    all_have_exp = True
    # Operands are already rounded to the autocast dtype; from there on nothing may be rounded again.
    with without_autocast(problem.products.device_type):
        if work is None:
            work = TorchRows(problem.options.softcap, plan=row_plan(problem), keep_slope=through_source and any(wanted))
        head = head_products(problem)
        gradients = grad_TV = None
        if isinstance(problem, LogitsProblem):
            grad_TV = torch.zeros_like(problem.logits_TV) if wanted[0] else None
        elif any(wanted):
            assert head is not None
            gradients = HeadGradients(problem, head, wanted, weight_T)
        back_projection = gradients is not None and wanted[0] and not through_source
        chunk: Chunk | None = None
        for chunk in chunks(problem, back_projection=back_projection, work=work, head=head):
            cross_entropy_C, auxiliary_C = chunk.loss.cross_entropy, chunk.loss.auxiliary
            if auxiliary_C.shape != cross_entropy_C.shape or auxiliary_C.dtype != cross_entropy_C.dtype:
                # A registered objective may return one number for all tokens.
                auxiliary_C = auxiliary_C.to(cross_entropy_C).expand_as(cross_entropy_C)
            all_have_exp &= chunk.rows.all_have_exp
            kept.append((cross_entropy_C, auxiliary_C, chunk.stats))
            if sources is not None:
                sources.append(row_source(problem.shard, chunk, chunk.exp_coefficients(scaled_T)))
            elif through_source and (gradients is not None or grad_TV is not None):
                source_CV = chunk_source(
                    work, problem.shard, chunk, chunk.exp_coefficients(weight_T), through_softcap=True
                )
                if gradients is not None:
                    gradients.add_source(chunk, source_CV)
                elif grad_TV is not None:
                    grad_TV[chunk.tokens, : problem.local_rows] = source_CV if scale == 1 else source_CV.mul_(scale)
            elif gradients is not None:
                gradients.add(chunk)
        del chunk  # frees the V-wide buffers before a gradient is copied to 16 bits
        formed: tuple[Tensor | None, ...] = (grad_TV, None, None)[: len(wanted)]
        if gradients is not None:
            formed = gradients.finish()
    cross_entropy_T, auxiliary_T, stats = _joined(problem, kept)
    reduced, source = problem.targets.reduced, None if sources is None else _joined_sources(sources, weight_T)
    return ChunkedRun(reduced(cross_entropy_T), reduced(auxiliary_T), stats, all_have_exp, formed, source)


def _joined(problem: LossProblem, kept: list[tuple[Tensor, Tensor, TokenStats]]) -> tuple[Tensor, Tensor, TokenStats]:
    """Cross-entropy, auxiliary and statistics of all tokens, from those of every chunk."""
    if len(kept) == 1:
        return kept[0]
    names = problem.plan.present
    if not kept:
        empty = problem.targets.weight_T.new_zeros(0)
        columns = [empty, empty, *(empty.long() if name == "predicted" else empty for name in names)]
    else:
        parts = zip(*([ce, aux, *(getattr(stats, name) for name in names)] for ce, aux, stats in kept), strict=True)
        columns = [torch.cat(part) for part in parts]
    stats = TokenStats(
        valid=problem.targets.valid_T, vocab=problem.shard.total, **dict(zip(names, columns[2:], strict=True))
    )
    return columns[0], columns[1], stats


def _joined_sources(parts: list[RowSource], weight_T: Tensor) -> RowSource:
    """The sources of all tokens, from those of every chunk."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = weight_T.new_zeros(0)
        return RowSource(empty, empty.long(), empty, empty, None)
    *always, uniform = zip(*parts, strict=True)
    row_max_T, index_T, p_T, target_T = (torch.cat(part) for part in always)
    return RowSource(row_max_T, index_T, p_T, target_T, None if uniform[0] is None else torch.cat(uniform))


def row_plan(problem: HeadProblem | LogitsProblem) -> ProductPlan:
    """How the rows store E: as the products take it, and in full precision where the source is formed from it."""
    return fp32_plan(problem.dtype) if isinstance(problem, LogitsProblem) else problem.products


def head_products(problem: HeadProblem | LogitsProblem) -> HeadProducts | None:
    """`HeadProducts` of the problem's head; None without a head, or if given logits do not need it."""
    weight_VD, vocab = problem.weight_VD, problem.local_rows
    if weight_VD is None or (isinstance(problem, LogitsProblem) and not problem.plan.gain):
        return None
    inside_VD = weight_VD if weight_VD.shape[0] == vocab else weight_VD[:vocab]
    return HeadProducts(inside_VD, problem.dtype, problem.rounding, problem.products)


def chunks(
    problem: HeadProblem | LogitsProblem,
    *,
    back_projection: bool,
    work: RowWork | None = None,
    head: HeadProducts | None = None,
) -> Iterator[Chunk]:
    """Statistics and coefficients chunk by chunk; the V-wide buffers are reused, so use a chunk before the next.

    E W is formed if `back_projection` requests it or the plan has the gain.
    """
    options, targets, shard = problem.options, problem.targets, problem.shard
    plan, products, scale = problem.plan, problem.products, options.logit_scale
    work = TorchRows(options.softcap, plan=row_plan(problem)) if work is None else work
    head = head_products(problem) if head is None else head
    bias_V = mean_row_D = mean_bias = None
    if isinstance(problem, HeadProblem):
        bias_V = problem.scaled_bias()
        like, needs_mean_row, needs_mean = problem.hidden_TD, plan.mu, plan.mu_residual or problem.through_source
        # The entropy comes from E W, except if there is no mean, if a bias meets a 16-bit E (E·b would lose digits), or on
        # a shard (E W covers local rows only): then it takes a pass over E.
        drop = plan.entropy and (not plan.mu or (bias_V is not None and products.narrow) or not shard.whole)
    else:
        like, needs_mean_row, needs_mean = problem.logits_TV, plan.gain_centered, plan.mu or options.uses_mean
        drop = plan.entropy
    if head is not None and needs_mean_row:
        if bias_V is None:
            mean_row_D = shard.mean(head.mean())
        else:
            means = shard.mean(torch.cat([head.mean(), bias_V.mean(dim=0, keepdim=True)]))
            mean_row_D, mean_bias = means[:-1], means[-1]

    needs = RowNeeds(norm=plan.p_norm, mean=needs_mean, drop=drop, argmax=plan.predicted)
    row_statistics = work.statistics if shard.rows else statistics_of_no_rows
    token_bytes = shard.widest * (work.buffers * problem.dtype.itemsize + 2 * products.narrow)
    bounds = chunk_bounds(
        targets.index_T.shape[0],
        token_bytes,
        options.chunk_size,
        device_type=products.device_type,
        memory_budget=options.memory_budget,
    )
    longest = bounds[0][1] if bounds else 0
    buffers_BCV = empty_rows(work.buffers, longest, shard.rows, problem.dtype, products, like)
    narrow_CV = empty_rows(1, longest, shard.rows, products.factor, products, like)[0] if products.narrow else None

    for start, stop in bounds:
        tokens, length = slice(start, stop), stop - start
        index_C, has_target_C = shard.local_targets(at_tokens(targets.index_T, tokens))
        valid_C = at_tokens(targets.valid_T, tokens)
        chunk_BCV = buffers_BCV if length == longest else buffers_BCV[:, :length]
        chunk_narrow_CV = None if narrow_CV is None else narrow_CV[:length]

        # Product 1, h Wᵀ: the logits s(W u + b), in the first buffer. The row pass then overwrites them with E.
        z_CV, hidden_CD = chunk_BCV[0], None
        if isinstance(problem, HeadProblem):
            assert head is not None
            operand_CD = at_tokens(problem.hidden_TD.detach(), tokens)
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
        else:
            z_CV.copy_(problem.logits_TV.detach()[tokens, : shard.rows])
            if scale != 1:
                z_CV.mul_(scale)
        rows = row_statistics(chunk_BCV, chunk_narrow_CV if work.plan.narrow else None, index_C, needs)
        sums, share = join_row_sums(shard, rows.sums, has_target_C, drop=drop, argmax=plan.predicted)

        # Product 2, E W = S·Wᵀp: for the gain and for dh. Product 3, Eᵀ(x∘h), is that of dW (`HeadGradients`).
        projected_CD = target_rows_CD = None
        if head is not None and (back_projection or plan.gain):
            e_CV = rows.e_CV if hidden_CD is not None else product_exp(rows.e_CV, products, chunk_narrow_CV)
            projected_CD = head.back_project(e_CV)
            if not shard.whole and (plan.gain or hidden_CD is None):
                projected_CD, target_rows_CD = _sum_over_ranks(
                    shard, head, share, projected_CD, index_C, with_target_rows=back_projection
                )

        # From hidden states μ = w̄·u + b̄ comes from the means of the head and not from the logits.
        mu_C, energy_C = sums.mean_logit_C if hidden_CD is None else None, None
        from_energy = plan.entropy and sums.drop_C is None  # the Triton kernels always have the drop
        centered_CD = None
        if projected_CD is not None and mean_row_D is not None and (plan.gain_centered or from_energy):
            centered_CD = torch.addcmul(projected_CD, sums.sum_C.unsqueeze(1), mean_row_D, value=-1)  # S (Wᵀp − w̄)
        if hidden_CD is not None and mean_row_D is not None:
            mu_C = hidden_CD @ mean_row_D
            mu_C = mu_C if mean_bias is None else mu_C + mean_bias
            if from_energy:
                assert centered_CD is not None
                energy_C = mean_energy(sums.sum_C, rows.e_CV, hidden_CD, centered_CD, bias_V, mean_bias)
        stats = chunk_stats(
            plan,
            sums,
            valid_C,
            shard.total,
            all_valid=targets.all_valid,
            mu_C=mu_C,
            mean_energy_C=energy_C,
            projected_CD=projected_CD,
            centered_CD=centered_CD,
            logit_scale=scale,
        )
        del centered_CD  # [C, D], not needed while the caller uses the chunk
        if hidden_CD is None:
            check_mean(sums.mean_logit_C, valid_C, options)
        # Under softcap the mean logit is not a valid coordinate and is not reported, but label smoothing uses it.
        smoothed = replace(stats, mu=sums.mean_logit_C) if problem.through_source else stats
        yield Chunk(
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


def chunk_source(
    work: RowWork, shard: VocabularyShard, chunk: Chunk, coefficients: Coefficients, *, through_softcap: bool
) -> Tensor:
    """The source with these weighted coefficients at the local rows of the vocabulary, [C, rows]; the rows of the chunk
    are consumed."""
    if not shard.rows:
        return chunk.rows.buffer_CV
    valid_C, local = _local_source(shard, chunk, coefficients)
    return work.source(chunk.rows, chunk.index_C, valid_C, local, through_softcap=through_softcap)


def row_source(shard: VocabularyShard, chunk: Chunk, coefficients: Coefficients) -> RowSource:
    """The same as a few numbers per row, from which the backward pass forms the source."""
    valid_C, local = _local_source(shard, chunk, coefficients)
    assert local.b is not None
    return RowSource(chunk.rows.sums.row_max_C, torch.where(valid_C, chunk.index_C, -1), local.a, local.b, local.g)


def _local_source(shard: VocabularyShard, chunk: Chunk, coefficients: Coefficients) -> tuple[Tensor, Coefficients]:
    """(rows that have a source, its coefficients) for the local rows of the vocabulary."""
    valid_C = chunk.stats.valid
    if not shard.whole:
        # If every local logit is -inf, there is no E and no source.
        valid_C = valid_C & ~torch.isneginf(chunk.rows.sums.row_max_C)
        if coefficients.g is not None:  # row work divides g by the local rows, so it gets their share of V
            coefficients = replace(coefficients, g=coefficients.g * (shard.rows / shard.total))
    return valid_C, chunk.share.local(coefficients)
