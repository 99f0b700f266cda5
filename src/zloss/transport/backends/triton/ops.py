"""The row kernels as custom ops, so that torch.compile traces around them.

All take logits [T, V] of fp32, bf16 or fp16 with any row stride; `vocab` columns are inside log Z, z = scale·logits,
softcapped where asked. Coefficients are fp32 [T]; `index` is int64 [T], negative at rows that count nothing.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from zloss.transport.backends.triton.kernels import (
    INTERPRETED,
    row_exp_kernel,
    row_source_kernel,
    row_statistics_kernel,
)

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
    """The kernels read the columns of a row as neighbours in memory; the rows may have any stride."""
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


@row_statistics.register_fake
def _(logits: Tensor, index: Tensor, vocab: int, scale: float, softcap: float | None) -> Tensor:
    return logits.new_empty((STATISTICS, logits.shape[0]), dtype=torch.float32)


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


@row_source.register_fake
def _(
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
    return torch.empty(logits.shape, dtype=dtype, device=logits.device)


@torch.library.custom_op("zloss::exp_rows_", mutates_args=("logits",))
def exp_rows_(logits: Tensor, row_max: Tensor, softcap: float | None) -> None:
    """Overwrite an owned fp32 buffer of logits with exp(z − m), times the slope of the softcap."""
    ones, zeros = torch.ones_like(row_max), torch.zeros_like(row_max)
    index = torch.zeros_like(row_max, dtype=torch.int64)
    launch_source(logits, logits, row_max, index, (ones, zeros, zeros), logits.shape[1], 1.0, softcap, True)


@exp_rows_.register_fake
def _(logits: Tensor, row_max: Tensor, softcap: float | None) -> None:
    return None


@torch.library.custom_op("zloss::narrow_exp_", mutates_args=("out",))
def narrow_exp_(
    logits: Tensor, out: Tensor, row_max: Tensor, exp_scale: float, scale: float, softcap: float | None
) -> Tensor:
    """Write exp_scale·exp(z − m), times the slope of the softcap, rounded to the 16-bit `out` [T, V]. Returns the first
    column with z = m, int64 [T]."""
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


@narrow_exp_.register_fake
def _(logits: Tensor, out: Tensor, row_max: Tensor, exp_scale: float, scale: float, softcap: float | None) -> Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
