"""The loss from logits one already has, through the row ops: one pass for the statistics, one for the gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from zloss.source.statistics import TokenStats
from zloss.transport.backends.head_rows import HeadRows
from zloss.transport.backends.rows import RowSums, chunk_stats, inject
from zloss.transport.backends.triton.ops import row_loss, row_projection, row_statistics
from zloss.transport.logits_problem import LogitsProblem, check_stats


def triton_logits_loss(problem: LogitsProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    """(loss, cross-entropy, auxiliary, statistics), reduced; the loss carries gradient to the logits."""
    options, targets, vocab = problem.options, problem.targets, problem.vocab
    valid_T, weight_T, scale = targets.valid_T, targets.weights.per_token, options.logit_scale
    logits_TV = problem.logits_TV
    detached_TV = logits_TV.detach()
    row_max_T, sum_T, square_T, total_T, target_logit_T = row_statistics(
        detached_TV, targets.index_T, vocab, scale, options.softcap
    ).unbind()
    stats = _statistics(problem, RowSums(row_max_T, sum_T, square_T.sqrt()), total_T, target_logit_T)
    check_stats(stats, options)
    # Under softcap μ is no coordinate and stays out of the record, but label smoothing may still use the mean logit.
    injection = inject(replace(stats, mu=total_T / vocab), options)

    zero = weight_T.new_zeros(())
    ce = torch.where(valid_T, weight_T * injection.cross_entropy, zero)
    aux = torch.where(valid_T, weight_T * injection.auxiliary, zero)
    uniform_T = weight_T * injection.along_uniform
    loss = row_loss(
        logits_TV,
        ce + aux,
        row_max_T,
        torch.where(valid_T, targets.index_T, -1),
        scale * weight_T * injection.along_p / sum_T,
        scale * weight_T * injection.along_target,
        scale * uniform_T / vocab,
        vocab,
        scale,
        options.softcap,
    )
    if options.reduction != "none":
        loss, ce, aux = loss.sum(), ce.sum(), aux.sum()
    return loss, ce, aux, stats


def _statistics(problem: LogitsProblem, sums: RowSums, total_T: Tensor, target_logit_T: Tensor) -> TokenStats:
    options, vocab = problem.options, problem.vocab
    full = options.statistics != "light"
    mu_wanted = options.softcap is None and (full or options.objective.needs_mu or options.label_smoothing != 0)
    projected_TD = mean_row_D = None
    if problem.weight_VD is not None and (full or (options.objective.active and options.objective.needs_gain)):
        weight_VD = problem.weight_VD.detach()[:vocab]
        projected_TD = row_projection(
            problem.logits_TV.detach(),
            sums.row_max_C,
            weight_VD,
            options.logit_scale,
            options.softcap,
            options.chunk_size,
        )
        if full and mu_wanted:
            mean_row_D = HeadRows(weight_VD, problem.dtype, None).mean()
    else:
        sums = sums if full else replace(sums, norm_C=None)
    return chunk_stats(
        sums,
        target_logit_T,
        problem.targets.valid_T,
        vocab,
        mu_C=total_T / vocab if mu_wanted else None,
        projected_CD=projected_TD,
        mean_row_D=mean_row_D,
        logit_scale=options.logit_scale,
    )
