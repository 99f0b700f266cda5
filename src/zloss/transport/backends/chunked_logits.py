"""The chunked loss from logits: a chunk of rows is copied to a buffer, so the caller's logits are never overwritten.

Memory beyond the gradient: the buffers of one chunk.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from zloss.source.injection import inject, weighted_source
from zloss.transport.backends.chunk_sizes import chunk_bounds
from zloss.transport.backends.chunk_statistics import chunk_stats
from zloss.transport.backends.chunked_autograd import Operands, chunked_loss
from zloss.transport.backends.chunks import ChunkedRun, LogitsChunk, own_source
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.joined_rows import clear_absent_rows_, join_rows, row_pass
from zloss.transport.backends.loss_parts import LossParts
from zloss.transport.backends.narrow_parts import product_exp
from zloss.transport.backends.row_work import RowWork
from zloss.transport.backends.torch_rows import TorchRows
from zloss.transport.logits_problem import LogitsProblem
from zloss.transport.masked_logits import check_mean, check_rows, needs_mean


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
