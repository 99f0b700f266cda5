"""The losses through Triton: chunked matrix products around the row kernels, or the row ops on logits you already have.

Nothing here is imported before a Triton loss runs (`options.py` finds out whether it can).

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, check_mean
from zloss.head.chunked import chunked_head_loss, run_head_chunks, stored_gradient, wanted_gradients
from zloss.head.products import HeadProducts, ProductPlan, applied_exp, fp32_plan
from zloss.head.rows import RowPass, RowSums, chunk_stats, has_exp
from zloss.head.triton_ops import (
    exp_rows_,
    narrow_exp_,
    row_loss,
    row_projection,
    row_source,
    row_statistics,
    with_gradients,
)
from zloss.objectives import Coefficients, token_loss
from zloss.statistics import TokenStats


def triton_head_loss(problem: HeadProblem) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias.

    For scalar reductions the gradients are formed in the forward pass, chunk by chunk, and handed to autograd by an op, so
    that torch.compile can trace the whole loss. reduction="none" recomputes the chunks in backward, a buffer for dW is
    changed, and ranks are summed over: those run outside any trace.
    """
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=False)
    if problem.options.reduction == "none" or problem.weight_grad_buffer is not None or not problem.shard.whole:
        return chunked_head_loss(problem, work)
    operands = problem.operands
    with torch.no_grad():
        wanted = wanted_gradients(operands, grad_enabled=problem.grad_enabled)
        run = run_head_chunks(problem, wanted, problem.targets.weight_T, work)
        value = run.value()
    grads = [stored_gradient(grad, like) for grad, like in zip(run.gradients, operands, strict=True)]
    return run.parts(with_gradients(value, *operands, *grads))


def triton_logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss of all rows at once, with gradient to the logits: one pass for the statistics, one for the gradient."""
    with torch.autocast(problem.logits_TV.device.type, enabled=False):
        return _logits_loss(problem)


def _logits_loss(problem: LogitsProblem) -> LossParts:
    options, targets, vocab = problem.options, problem.targets, problem.vocab
    valid_T, scale = targets.valid_T, options.logit_scale
    row_max_T, sum_T, square_T, total_T, target_logit_T, drop_T = row_statistics(
        problem.logits_TV.detach(), targets.index_T, vocab, scale, options.softcap
    ).unbind()
    mean_T = total_T / vocab
    sums = RowSums(row_max_T, sum_T, target_logit_T, square_T.sqrt(), drop_T, mean_T)
    stats = _logits_statistics(problem, sums)
    check_mean(mean_T, valid_T, options)
    # Under softcap the mean is not a coordinate and stays out of the record, but label smoothing uses it.
    loss = token_loss(replace(stats, mu=mean_T), options.objective, options.label_smoothing)

    ce_T, aux_T = targets.weighted(loss.cross_entropy), targets.weighted(loss.auxiliary)
    weighted = loss.coefficients.weighted(scale * targets.weight_T, valid_T, sum_T)
    zero_T = torch.zeros_like(sum_T)
    loss_T = row_loss(
        problem.logits_TV,
        ce_T + aux_T,
        row_max_T,
        torch.where(valid_T, targets.index_T, -1),
        weighted.a,
        zero_T if weighted.b is None else weighted.b,
        zero_T if weighted.g is None else weighted.g / vocab,
        vocab,
        scale,
        options.softcap,
    )
    if options.reduction == "none":
        return loss_T, ce_T, aux_T, stats
    return loss_T.sum(), ce_T.sum(), aux_T.sum(), stats


def _logits_statistics(problem: LogitsProblem, sums: RowSums) -> TokenStats:
    options, vocab, plan = problem.options, problem.vocab, problem.plan
    projected_TD = mean_row_D = None
    if problem.weight_VD is not None and plan.gain:
        weight_VD = problem.weight_VD.detach()[:vocab]
        projected_TD = row_projection(
            problem.logits_TV.detach(),
            sums.row_max_C,
            weight_VD,
            options.logit_scale,
            options.softcap,
            options.chunk_size,
            options.products,
            options.memory_budget,
        )
        if plan.gain_centered:
            mean_row_D = HeadProducts(weight_VD, problem.dtype, None).mean()
    return chunk_stats(
        plan,
        sums,
        problem.targets.valid_T,
        vocab,
        mu_C=sums.mean_logit_C,
        projected_CD=projected_TD,
        mean_row_D=mean_row_D,
        logit_scale=options.logit_scale,
    )


class TritonRows:
    """Row work in two kernels: row sums of an fp32 chunk of logits (one read), then E (one read, one write).

    E replaces the logits where the products take it in fp32, and is written to a separate buffer in 16 bits otherwise.
    Softcap and its slope stay in registers, so one V-wide fp32 buffer is enough.

    A source is formed from the logits: it needs `keep_logits`, and with it a second buffer where E is fp32.
    """

    def __init__(self, softcap: float | None, *, plan: ProductPlan | None = None, keep_logits: bool) -> None:
        self._softcap, self._keep = softcap, keep_logits
        self.plan = fp32_plan() if plan is None else plan
        self.buffers = 2 if keep_logits and not self.plan.narrow else 1

    def statistics(
        self, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, *, norm: bool, mean: bool, drop: bool
    ) -> RowPass:
        z_CV = buffers_BCV[0]
        vocab = z_CV.shape[1]
        numbers = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap)
        row_max, total, square, logit_sum, target, drop_C = numbers.unbind()
        norm_C = square.sqrt() if norm else None
        sums = RowSums(row_max, total, target, norm_C, drop_C, logit_sum / vocab if mean else None)
        # The kernels write an E of 0 where m is not finite; a row of NaN may have a finite one.
        anchor_C = torch.where(has_exp(sums), row_max, torch.nan)
        if narrow_CV is not None:
            max_index_C = narrow_exp_(z_CV, narrow_CV, anchor_C, self.plan.exp_scale, 1.0, self._softcap)
            return RowPass(sums, narrow_CV, z_CV, max_index_C=max_index_C)
        e_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(e_CV, anchor_C, self._softcap)
        return RowPass(sums, e_CV, z_CV)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, coefficients: Coefficients, *, through_softcap: bool
    ) -> Tensor:
        assert self._keep, "made with keep_logits=False"
        a_C = coefficients.a
        zero_C = torch.zeros_like(a_C)
        b_C = zero_C if coefficients.b is None else coefficients.b
        g_C = zero_C if coefficients.g is None else coefficients.g / rows.buffer_CV.shape[1]
        if not self.plan.narrow:
            return self._source(rows, index_C, valid_C, a_C, b_C, g_C, through_softcap)
        # E rounded as the products take it, then the rest, which is not rounded.
        assert not through_softcap, "the source before the softcap is formed in fp32 only"
        always_C = torch.ones_like(valid_C)
        e_CV = self._source(rows, index_C, always_C, torch.ones_like(zero_C), zero_C, zero_C, slope=False)
        rest_CV = self._source(rows, index_C, valid_C, zero_C, b_C, g_C, slope=False)
        applied_CV = applied_exp(e_CV, self.plan) * a_C.unsqueeze(1)
        return torch.where(valid_C.unsqueeze(1), rest_CV + applied_CV, 0.0)

    def _source(
        self,
        rows: RowPass,
        index_C: Tensor,
        valid_C: Tensor,
        a_C: Tensor,
        b_C: Tensor,
        g_C: Tensor,
        slope: bool,
    ) -> Tensor:
        z_CV = rows.buffer_CV
        source_CV: Tensor = row_source(
            z_CV,
            rows.sums.row_max_C,
            torch.where(valid_C, index_C, -1),
            a_C,
            b_C,
            g_C,
            z_CV.shape[1],
            1.0,
            self._softcap,
            slope,
            torch.float32,
        )
        return source_CV
