"""The head loss through Triton: chunked matrix products around the row kernels.

For scalar reductions the gradients are formed in the forward pass, chunk by chunk, and handed to autograd by an op, so
that torch.compile can trace the whole loss; reduction="none" recomputes the chunks in backward, outside any trace, and a
buffer for dW is changed outside any trace, and so are sums over ranks.

[zloss.head.triton] The loss from logits one already has, through the row ops: one pass for the statistics, one for the gradient.

Axes: T tokens, V vocabulary, D width.

[zloss.head.triton] The row kernels as the `RowWork` of a chunked pass: statistics of an fp32 chunk of logits, then E.

E replaces the logits where the products take it in fp32, and is written beside them in 16 bits otherwise. They
move one read of the logits for the statistics, one read and one write for E.
"""

from __future__ import annotations

import torch
from zloss.head.chunked import narrow, wanted_gradients
from zloss.head.chunked import chunked_head_loss, run_head_chunks
from zloss.head.chunked import LossParts, parts_of, reduced
from zloss.head.triton_ops import with_gradients
from zloss.head.arguments import HeadProblem
from dataclasses import replace
from torch import Tensor
from zloss.objectives import inject, weighted_source
from zloss.statistics import TokenStats
from zloss.head.rows import chunk_stats
from zloss.head.products import HeadProducts
from zloss.head.chunked import LossParts
from zloss.head.rows import RowSums
from zloss.head.triton_ops import row_loss
from zloss.head.triton_ops import row_statistics
from zloss.head.triton_ops import row_projection
from zloss.head.arguments import LogitsProblem
from zloss.head.arguments import check_mean, check_rows
from zloss.objectives import WeightedSource
from zloss.head.products import applied_exp
from zloss.head.products import ProductPlan, fp32_plan
from zloss.head.rows import RowPass, RowSums
from zloss.head.triton_ops import exp_rows_, narrow_exp_, row_source, row_statistics


# <<< zloss.head.triton
def triton_head_loss(problem: HeadProblem) -> LossParts:
    """The loss in chunks, with gradient to hidden, weight and bias."""
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=False)
    if problem.options.reduction == "none" or problem.weight_grad_buffer is not None or not problem.shard.whole:
        return chunked_head_loss(problem, work)
    targets, operands = problem.targets, problem.operands
    with torch.no_grad():
        wanted = wanted_gradients(operands, grad_enabled=problem.grad_enabled)
        run = run_head_chunks(problem, work, wanted, targets.weights.per_token)
        value = reduced(targets, run.cross_entropy_T + run.auxiliary_T)
    grads = [narrow(grad, like) for grad, like in zip(run.gradients, operands, strict=True)]
    return parts_of(with_gradients(value, *operands, *grads), run, targets, problem.vocab)


# <<< zloss.head.triton
def triton_logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss of all rows at once, with gradient to the logits."""
    with torch.autocast(problem.logits_TV.device.type, enabled=False):
        return _loss(problem)


def _loss(problem: LogitsProblem) -> LossParts:
    options, targets, vocab = problem.options, problem.targets, problem.vocab
    valid_T, scale = targets.valid_T, options.logit_scale
    row_max_T, sum_T, square_T, total_T, target_logit_T, drop_T = row_statistics(
        problem.logits_TV.detach(), targets.index_T, vocab, scale, options.softcap
    ).unbind()
    mean_T = total_T / vocab
    stats = _statistics(problem, RowSums(row_max_T, sum_T, square_T.sqrt(), drop_T), mean_T, target_logit_T)
    check_rows(stats)
    check_mean(mean_T, valid_T, options)
    # Under softcap the mean is no coordinate and stays out of the record, but label smoothing uses it.
    injection = inject(replace(stats, mu=mean_T), options.objective, options.label_smoothing)

    ce_T, aux_T = targets.weighted(injection.cross_entropy), targets.weighted(injection.auxiliary)
    source = weighted_source(injection, sum_T, valid_T, scale * targets.weights.per_token)
    zero_T = torch.zeros_like(sum_T)
    loss_T = row_loss(
        problem.logits_TV,
        ce_T + aux_T,
        row_max_T,
        torch.where(valid_T, targets.index_T, -1),
        source.along_exp_C,
        zero_T if source.along_target_C is None else source.along_target_C,
        zero_T if source.along_uniform_C is None else source.along_uniform_C / vocab,
        vocab,
        scale,
        options.softcap,
    )
    if options.reduction == "none":
        return LossParts(loss_T, ce_T, aux_T, stats)
    return LossParts(loss_T.sum(), ce_T.sum(), aux_T.sum(), stats)


def _statistics(problem: LogitsProblem, sums: RowSums, mean_T: Tensor, target_logit_T: Tensor) -> TokenStats:
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
        target_logit_T,
        problem.targets.valid_T,
        vocab,
        mu_C=mean_T,
        projected_CD=projected_TD,
        mean_row_D=mean_row_D,
        logit_scale=options.logit_scale,
    )


# <<< zloss.head.triton
class TritonRows:
    """Row work in two kernels. Softcap and its slope stay in registers, so one V-wide fp32 buffer is enough.

    A source is formed from the logits: it needs `keep_logits`, and with it a second buffer where E is fp32.
    """

    def __init__(self, softcap: float | None, *, plan: ProductPlan | None = None, keep_logits: bool) -> None:
        self._softcap, self._keep = softcap, keep_logits
        self.plan = fp32_plan() if plan is None else plan
        self.buffers = 2 if keep_logits and not self.plan.narrow else 1

    def statistics(
        self,
        buffers_BCV: Tensor,
        narrow_CV: Tensor | None,
        index_C: Tensor,
        *,
        norm: bool,
        mean: bool,
        drop: bool = False,
    ) -> RowPass:
        z_CV = buffers_BCV[0]
        vocab = z_CV.shape[1]
        numbers = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap)
        row_max, total, square, logit_sum, target, drop_C = numbers.unbind()
        sums = RowSums(row_max, total, square.sqrt() if norm else None, drop_C)
        mean_C = logit_sum / vocab if mean else None
        if narrow_CV is not None:
            max_index_C = narrow_exp_(z_CV, narrow_CV, row_max, self.plan.exp_scale, 1.0, self._softcap)
            return RowPass(sums, target, mean_C, narrow_CV, z_CV, max_index_C=max_index_C)
        shaped_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(shaped_CV, row_max, self._softcap)
        return RowPass(sums, target, mean_C, shaped_CV, z_CV)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        assert self._keep, "made with keep_logits=False"
        zero_C = torch.zeros_like(source.along_exp_C)
        target_C = zero_C if source.along_target_C is None else source.along_target_C
        uniform_C = zero_C if source.along_uniform_C is None else source.along_uniform_C / rows.source_CV.shape[1]
        if not self.plan.narrow:
            return self._source(rows, index_C, valid_C, source.along_exp_C, target_C, uniform_C, through_softcap)
        # E rounded as the products take it, then the rest, which is not rounded.
        assert not through_softcap, "the source before the softcap is formed in fp32 only"
        always_C = torch.ones_like(valid_C)
        e_CV = self._source(rows, index_C, always_C, torch.ones_like(zero_C), zero_C, zero_C, slope=False)
        rest_CV = self._source(rows, index_C, valid_C, zero_C, target_C, uniform_C, slope=False)
        applied_CV = applied_exp(e_CV, self.plan) * source.along_exp_C.unsqueeze(1)
        return torch.where(valid_C.unsqueeze(1), rest_CV + applied_CV, 0.0)

    def _source(
        self,
        rows: RowPass,
        index_C: Tensor,
        valid_C: Tensor,
        along_exp_C: Tensor,
        along_target_C: Tensor,
        along_uniform_C: Tensor,
        slope: bool,
    ) -> Tensor:
        z_CV = rows.source_CV
        source_CV: Tensor = row_source(
            z_CV,
            rows.sums.row_max_C,
            torch.where(valid_C, index_C, -1),
            along_exp_C,
            along_target_C,
            along_uniform_C,
            z_CV.shape[1],
            1.0,
            self._softcap,
            slope,
            torch.float32,
        )
        return source_CV
