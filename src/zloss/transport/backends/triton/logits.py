"""The loss from logits one already has, through the row ops: one pass for the statistics, one for the gradient.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zloss.source.injection import inject, weighted_source
from zloss.source.statistics import TokenStats
from zloss.transport.backends.chunk_statistics import chunk_stats
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.loss_parts import LossParts
from zloss.transport.backends.row_work import RowSums
from zloss.transport.backends.triton.gradient_ops import row_loss
from zloss.transport.backends.triton.ops import row_statistics
from zloss.transport.backends.triton.projection_op import row_projection
from zloss.transport.logits_problem import LogitsProblem
from zloss.transport.masked_logits import check_mean, check_rows


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
