"""The losses through Triton: chunked matrix products around the row kernels, or the row ops on logits you already have.

Nothing here is imported before a Triton loss runs (`options.py` finds out whether it can). First the losses and the row work
of their chunks, then the kernels as custom ops, so that torch.compile traces around them.

Axes: T tokens, C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import triton
from torch import Tensor

from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, check_mean, check_rows
from zloss.head.chunked import chunked_loss, loss_of_rows
from zloss.head.logits_gradient import RowSource
from zloss.head.options import Products, chunk_bounds
from zloss.head.products import HeadProducts, ProductPlan, applied_exp, plan_products
from zloss.head.rows import RowNeeds, RowPass, RowSums, chunk_stats, empty_rows, has_exp, row_argmax, softcapped
from zloss.head.triton_kernels import INTERPRETED, row_exp_kernel, row_source_kernel, row_statistics_kernel
from zloss.objectives import Coefficients, token_loss
from zloss.tensors import without_autocast


def triton_loss(problem: HeadProblem | LogitsProblem) -> LossParts:
    """The loss with gradient to hidden, weight and bias, in chunks; or to the logits, of all rows at once."""
    if isinstance(problem, LogitsProblem):
        return _logits_loss(problem)
    work = TritonRows(problem.options.softcap, plan=problem.products, keep_logits=problem.through_source)
    return chunked_loss(problem, work)


def _logits_loss(problem: LogitsProblem) -> LossParts:
    """The loss of all rows at once, with gradient to the logits: one pass for the statistics, one for the gradient."""
    options, targets, vocab, plan = problem.options, problem.targets, problem.local_rows, problem.plan
    valid_T, scale = targets.valid_T, options.logit_scale
    with without_autocast(problem.logits_TV.device.type):
        logits_TV = problem.logits_TV.detach()
        row_max_T, sum_T, square_T, total_T, target_logit_T, drop_T = row_statistics(
            logits_TV, targets.index_T, vocab, scale, options.softcap
        ).unbind()
        mean_T = total_T / vocab
        projected_TD = centered_TD = max_index_T = None
        if plan.predicted:
            max_index_T = final_argmax(logits_TV[:, :vocab].float(), scale, options.softcap)
        if problem.weight_VD is not None and plan.gain:
            weight_VD = problem.weight_VD.detach()[:vocab]
            shape = scale, options.softcap, options.chunk_size, options.products, options.memory_budget
            projected_TD = row_projection(logits_TV, row_max_T, weight_VD, *shape)
            if plan.gain_centered:
                mean_row_D = HeadProducts(weight_VD, problem.dtype, None).mean()
                centered_TD = torch.addcmul(projected_TD, sum_T.unsqueeze(1), mean_row_D, value=-1)
        stats = chunk_stats(
            plan,
            RowSums(row_max_T, sum_T, target_logit_T, square_T.sqrt(), drop_T, mean_T, max_index_T),
            valid_T,
            vocab,
            all_valid=targets.all_valid,
            mu_C=mean_T,
            projected_CD=projected_TD,
            centered_CD=centered_TD,
            logit_scale=scale,
        )
        check_mean(mean_T, valid_T, options)
        check_rows(stats)
        # Under softcap the mean is not a coordinate and stays out of the record, but label smoothing uses it.
        loss = token_loss(replace(stats, mu=mean_T), options.objective, options.label_smoothing)

        ce_T, aux_T = targets.weighted(loss.cross_entropy), targets.weighted(loss.auxiliary)
        weighted = loss.exp_coefficients(scale * targets.weight_T, None if targets.all_valid else valid_T, sum_T)
        assert weighted.b is not None
        source = RowSource(row_max_T, torch.where(valid_T, targets.index_T, -1), weighted.a, weighted.b, weighted.g)
        loss_T = loss_of_rows(problem, ce_T + aux_T, source, triton=True)
        if options.reduction == "none":
            return loss_T, ce_T, aux_T, stats
        return loss_T.sum(), ce_T.sum(), aux_T.sum(), stats


def final_argmax(logits_TV: Tensor, scale: float, softcap: float | None) -> Tensor:
    """arg max of the final logits. A softcap makes large logits equal, and of equal ones the first counts."""
    z_TV = logits_TV if scale == 1 else logits_TV * scale
    return row_argmax(z_TV if softcap is None else softcapped(z_TV, softcap))


class TritonRows:
    """Row work in two kernels: row sums of an fp32 chunk of logits (one read), then E (one read, one write).

    E replaces the logits where the products take it in fp32, and is written to a separate buffer in 16 bits otherwise.
    Softcap and its slope stay in registers, so one V-wide fp32 buffer is enough.

    A source is formed from the logits: it needs `keep_logits`, and with it a second buffer where E is fp32.
    """

    def __init__(self, softcap: float | None, *, plan: ProductPlan, keep_logits: bool) -> None:
        self._softcap, self.plan, self._keep = softcap, plan, keep_logits
        self.buffers = 2 if keep_logits and not self.plan.narrow else 1

    def statistics(self, buffers_BCV: Tensor, narrow_CV: Tensor | None, index_C: Tensor, needs: RowNeeds) -> RowPass:
        z_CV = buffers_BCV[0]
        vocab = z_CV.shape[1]
        numbers = row_statistics(z_CV, index_C, vocab, 1.0, self._softcap)
        row_max, total, square, logit_sum, target, drop_C = numbers.unbind()
        norm_C = square.sqrt() if needs.norm else None
        mean_C = logit_sum / vocab if needs.mean else None
        sums = RowSums(row_max, total, target, norm_C, drop_C, mean_C)
        # The kernels write an E of 0 where m is not finite; a row of NaN may have a finite one.
        anchor_C = torch.where(has_exp(sums), row_max, torch.nan)
        if narrow_CV is not None:
            max_index_C = narrow_exp_(z_CV, narrow_CV, anchor_C, self.plan.exp_scale, 1.0, self._softcap)
            # Not `sums._replace`, which torch.compile of torch 2.8 does not trace.
            return RowPass(RowSums(row_max, total, target, norm_C, drop_C, mean_C, max_index_C), narrow_CV, z_CV)
        if needs.argmax:
            max_index_C = final_argmax(z_CV, 1.0, self._softcap)
            sums = RowSums(row_max, total, target, norm_C, drop_C, mean_C, max_index_C)
        e_CV = buffers_BCV[1].copy_(z_CV) if self._keep else z_CV
        exp_rows_(e_CV, anchor_C, self._softcap)
        return RowPass(sums, e_CV, z_CV)

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, coefficients: Coefficients, *, through_softcap: bool
    ) -> Tensor:
        assert self._keep, "made with keep_logits=False"
        a_C, b_C, g_C = coefficients.filled()
        g_C = g_C / rows.buffer_CV.shape[1]
        index_C = torch.where(valid_C, index_C, -1)
        if not self.plan.narrow:
            return self._source(rows, index_C, (a_C, b_C, g_C), slope=through_softcap)
        # E rounded as the products take it, then the rest, which is not rounded.
        assert not through_softcap, "the source before the softcap is formed in fp32 only"
        zero_C = torch.zeros_like(a_C)
        e_CV = self._source(rows, index_C.clamp_min(0), (torch.ones_like(zero_C), zero_C, zero_C), slope=False)
        rest_CV = self._source(rows, index_C, (zero_C, b_C, g_C), slope=False)
        applied_CV = applied_exp(e_CV, self.plan) * a_C.unsqueeze(1)
        return torch.where(valid_C.unsqueeze(1), rest_CV + applied_CV, 0.0)

    def _source(self, rows: RowPass, index_C: Tensor, coefficients: tuple[Tensor, ...], *, slope: bool) -> Tensor:
        z_CV = rows.buffer_CV
        shape = z_CV.shape[1], 1.0, self._softcap, slope, torch.float32
        source_CV: Tensor = row_source(z_CV, rows.sums.row_max_C, index_C, *coefficients, *shape)
        return source_CV


# --- the kernels as custom ops --------------------------------------------------------------------------------------------
#
# All take logits [T, V] of fp32, bf16 or fp16 with any row stride; `vocab` columns are inside log Z, z = scale·logits,
# softcapped if requested. Coefficients are fp32 [T]; `index` is int64 [T], negative at rows that count nothing.

STATISTICS = 6
"""Rows of what `row_statistics` returns: m, S, Σ exp(z − m)², Σ z, z_y, Σ exp(z − m)·(m − z)."""

STATISTICS_BLOCK = 65536 if INTERPRETED else 4096
"""Columns that the statistics kernel reads per step: 4096 fit the registers of every GPU, more begin to spill. On the
interpreter every step has a fixed cost, so there the block is wide."""

SOURCE_BLOCK = 65536 if INTERPRETED else 1024
"""Columns per program of the source kernel; every column is independent of the others."""


def block_shape(columns: int, widest: int) -> tuple[int, int]:
    """(columns per block, warps)."""
    block = min(triton.next_power_of_2(columns), widest)
    return block, 8 if block > 2048 else 4


def by_rows(logits: Tensor) -> Tensor:
    """The kernels read the columns of a row as neighbors in memory; the rows may have any stride."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


@torch.library.custom_op("zloss::row_sums", mutates_args=())
def row_statistics(logits: Tensor, index: Tensor, vocab: int, scale: float, softcap: float | None) -> Tensor:
    """m, S, Σ exp(z − m)², Σ z, z_y and Σ exp(z − m)·(m − z) of every row, [6, T] in fp32; z_y is 0 at a negative index and NaN
    at one beyond the vocabulary.
    """
    logits = by_rows(logits)
    tokens = logits.shape[0]
    out = logits.new_empty((STATISTICS, tokens), dtype=torch.float32)
    block, warps = block_shape(vocab, STATISTICS_BLOCK)
    if tokens:
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            row_statistics_kernel[(tokens,)](
                logits,
                index.contiguous(),
                out,
                logits.stride(0),
                tokens,
                vocab,
                scale,
                1.0 if softcap is None else softcap,
                SOFTCAP=softcap is not None,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=True,
            )
    return out


row_statistics.register_fake(lambda logits, *_: logits.new_empty((STATISTICS, logits.shape[0]), dtype=torch.float32))


def launch_source(
    logits: Tensor,
    out: Tensor,
    row_max: Tensor,
    index: Tensor,
    coefficients: tuple[Tensor, Tensor, Tensor],
    vocab: int,
    scale: float,
    softcap: float | None,
    slope: bool,
) -> None:
    """Write coefficients·(exp(z − m), onehot(y), 1) to `out`, as `row_source` says; `out` may be `logits` itself."""
    tokens, columns = out.shape
    block, warps = block_shape(columns, SOURCE_BLOCK)
    if tokens == 0:
        return
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        row_source_kernel[(tokens, triton.cdiv(columns, block))](
            logits,
            out,
            index.contiguous(),
            row_max.contiguous(),
            *(coefficient.contiguous() for coefficient in coefficients),
            logits.stride(0),
            out.stride(0),
            vocab,
            columns,
            scale,
            1.0 if softcap is None else softcap,
            SOFTCAP=softcap is not None,
            SLOPE=slope,
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )


@torch.library.custom_op("zloss::row_source", mutates_args=())
def row_source(
    logits: Tensor,
    row_max: Tensor,
    index: Tensor,
    along_p: Tensor,
    along_target: Tensor,
    along_uniform: Tensor,
    vocab: int,
    scale: float,
    softcap: float | None,
    slope: bool,
    dtype: torch.dtype,
) -> Tensor:
    """along_p·exp(z − m) − along_target·onehot(y) − along_uniform as [T, V] in `dtype`; 0 at padding and ignored rows.

    `slope` multiplies by the derivative of the softcap. The logits are left alone.
    """
    logits = by_rows(logits)
    # A GPU rounds to the nearest 16-bit number; the interpreter truncates, so there torch does the rounding.
    out = torch.empty(logits.shape, dtype=torch.float32 if INTERPRETED else dtype, device=logits.device)
    coefficients = (along_p, along_target, along_uniform)
    launch_source(logits, out, row_max, index, coefficients, vocab, scale, softcap, slope)
    return out.to(dtype)


row_source.register_fake(
    lambda logits, *arguments: torch.empty(logits.shape, dtype=arguments[-1], device=logits.device)
)


@torch.library.custom_op("zloss::exp_rows_", mutates_args=("logits",))
def exp_rows_(logits: Tensor, row_max: Tensor, softcap: float | None) -> None:
    """Overwrite an owned fp32 buffer of logits with exp(z − m), times the slope of the softcap; with 0 where m is not finite."""
    ones, zeros = torch.ones_like(row_max), torch.zeros_like(row_max)
    index = torch.where(torch.isfinite(row_max), 0, -1)  # a row with a negative index is zero
    launch_source(logits, logits, row_max, index, (ones, zeros, zeros), logits.shape[1], 1.0, softcap, True)


exp_rows_.register_fake(lambda *_: None)


@torch.library.custom_op("zloss::narrow_exp_", mutates_args=("out",))
def narrow_exp_(
    logits: Tensor, out: Tensor, row_max: Tensor, exp_scale: float, scale: float, softcap: float | None
) -> Tensor:
    """Write exp_scale·exp(z − m), times the slope of the softcap, rounded to the 16-bit `out` [T, V]; 0 where m is not
    finite. Returns the first column with z = m, int64 [T]."""
    logits = by_rows(logits)
    tokens, vocab = out.shape
    # A GPU rounds to the nearest 16-bit number; the interpreter truncates, so there torch does the rounding.
    written = torch.empty((tokens, vocab), dtype=torch.float32, device=out.device) if INTERPRETED else out
    max_index = torch.full((tokens,), vocab - 1, dtype=torch.int32, device=logits.device)
    block, warps = block_shape(vocab, SOURCE_BLOCK)
    if tokens:
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            row_exp_kernel[(tokens, triton.cdiv(vocab, block))](
                logits,
                written,
                max_index,
                row_max.contiguous(),
                logits.stride(0),
                written.stride(0),
                vocab,
                scale,
                1.0 if softcap is None else softcap,
                exp_scale,
                SOFTCAP=softcap is not None,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=True,
            )
    if INTERPRETED:
        out.copy_(written)
    return max_index.long()


narrow_exp_.register_fake(lambda logits, *_: torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device))


@torch.library.custom_op("zloss::row_projection", mutates_args=())
def row_projection(
    logits: Tensor,
    row_max: Tensor,
    weight: Tensor,
    scale: float,
    softcap: float | None,
    chunk_size: int | None,
    products: str,
    memory_budget: int | None,
) -> Tensor:
    """(exp(z − m)·slope) W, which is S·WᵀCp of every row, [T, D] in fp32: chunks of rows, so no second [T, V] exists."""
    vocab = weight.shape[0]
    plan = plan_products(
        cast(Products, products), device_type=logits.device.type, hidden=weight.dtype, weight=weight.dtype
    )
    head = HeadProducts(weight, torch.float32, None, plan)
    out = logits.new_empty((logits.shape[0], weight.shape[1]), dtype=torch.float32)
    logits = by_rows(logits)
    bounds = chunk_bounds(
        logits.shape[0],
        vocab * (2 if plan.narrow else 4),
        chunk_size,
        device_type=plan.device_type,
        memory_budget=memory_budget,
    )
    for start, stop in bounds:
        chunk = slice(start, stop)
        if plan.narrow:
            narrow_CV = empty_rows(1, stop - start, vocab, plan.factor, plan, logits)[0]
            narrow_exp_(logits[chunk], narrow_CV, row_max[chunk], plan.exp_scale, scale, softcap)
            out[chunk] = head.back_project(narrow_CV)
            continue
        ones, zeros = torch.ones_like(row_max[chunk]), torch.zeros_like(row_max[chunk])
        index = torch.zeros_like(ones, dtype=torch.int64)
        e_CV = torch.empty((stop - start, vocab), dtype=torch.float32, device=logits.device)
        launch_source(logits[chunk], e_CV, row_max[chunk], index, (ones, zeros, zeros), vocab, scale, softcap, True)
        out[chunk] = head.back_project(e_CV)
    return out


row_projection.register_fake(
    lambda logits, row_max, weight, *_: logits.new_empty((logits.shape[0], weight.shape[1]), dtype=torch.float32)
)
