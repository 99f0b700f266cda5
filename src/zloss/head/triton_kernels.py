"""The row kernels: statistics out, coefficients in. They know nothing about objectives.

`row_statistics_kernel` reads a row of logits once (online softmax over vocabulary blocks); `row_exp_kernel` writes E in
the dtype of the products; `row_source_kernel` turns per-row coefficients into a row of gradient. All form the final logit
in the same way: load, upcast to fp32, logit scale, softcap, and only then the mask of the vocabulary, so that a padding
column can never enter log Z.

tanh is written out: the same arithmetic then runs compiled and interpreted.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def tanh_and_slope(x: tl.tensor) -> tl.tensor:
    """tanh(x) and 1 − tanh²(x), to a few fp32 ulps each: a series near 0, where 1 − exp(−2x) would cancel."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = size * (1.0 + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * series)))
    t = tl.where(size < 0.25, series, (1.0 - e) / (1.0 + e))
    # 4e/(1+e)² keeps its relative accuracy where 1 − t² has none left.
    return tl.where(x < 0.0, -t, t), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit  # type: ignore[untyped-decorator]
def row_statistics_kernel(
    logits_ptr: tl.tensor,
    index_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    tokens: tl.tensor,
    vocab: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row: m, S = Σ exp(z − m), Σ exp(z − m)², Σ z, z_y, Σ exp(z − m)·(m − z) into out [6, T]."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    lanes = tl.arange(0, BLOCK)
    row_max = -float("inf")
    row_sum = 0.0
    row_square = 0.0
    row_total = 0.0
    row_drop = 0.0
    for first in range(0, vocab, BLOCK):
        inside = first + lanes < vocab
        z = tl.load(row_ptr + first + lanes, mask=inside, other=0.0).to(tl.float32) * scale
        if SOFTCAP:
            t, _ = tanh_and_slope(z / cap)
            # A masked logit stays masked: tanh would turn -inf into the finite −cap and let it back into log Z.
            z = tl.where(z == -float("inf"), z, cap * t)
        row_total += tl.sum(tl.where(inside, z, 0.0), axis=0)
        z = tl.where(inside, z, -float("inf"))
        larger = tl.maximum(row_max, tl.max(z, axis=0))
        # While everything seen is -inf there is no maximum to subtract: −inf − (−inf) would be NaN.
        anchor = tl.where(larger == -float("inf"), 0.0, larger)
        carry = tl.exp(row_max - anchor)
        below = z - anchor
        e = tl.exp(below)
        # What was summed against the old maximum m lies anchor − m lower now; before the first finite logit that sum is 0.
        lower = tl.where(row_max == -float("inf"), 0.0, anchor - row_max)
        row_drop = carry * (row_drop + row_sum * lower)
        row_sum = row_sum * carry + tl.sum(e, axis=0)
        row_square = row_square * carry * carry + tl.sum(e * e, axis=0)
        # Last: summed before the others it costs ten registers and a spill on sm_90. exp(−1000) is 0, so −inf adds 0.
        row_drop -= tl.sum(e * tl.maximum(below, -1000.0), axis=0)
        row_max = larger
    index = tl.load(index_ptr + row)
    target = tl.load(row_ptr + index, mask=(index >= 0) & (index < vocab), other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        t, _ = tanh_and_slope(target / cap)
        target = tl.where(target == -float("inf"), target, cap * t)
    # An index beyond the vocabulary gives NaN; nothing is read there.
    target = tl.where(index < vocab, target, float("nan"))
    tl.store(out_ptr + row, row_max)
    tl.store(out_ptr + tokens + row, row_sum)
    tl.store(out_ptr + 2 * tokens + row, row_square)
    tl.store(out_ptr + 3 * tokens + row, row_total)
    tl.store(out_ptr + 4 * tokens + row, target)
    tl.store(out_ptr + 5 * tokens + row, row_drop)


@triton.jit  # type: ignore[untyped-decorator]
def row_source_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    index_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    along_p_ptr: tl.tensor,
    along_target_ptr: tl.tensor,
    along_uniform_ptr: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    vocab: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    SOFTCAP: tl.constexpr,
    SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block: along_p·exp(z − m) − along_target·onehot(y) − along_uniform.

    SLOPE carries it back through the softcap; a logit scale is the caller's, in the coefficients. A row with a negative
    index and the columns from `vocab` on are zero, whatever the logits hold there. `out` may be `logits` itself.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + row)
    inside = lanes < tl.where(index >= 0, vocab, 0)
    z = tl.load(logits_ptr + row * row_stride + lanes, mask=inside, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        t, slope = tanh_and_slope(z / cap)
        z = tl.where(z == -float("inf"), z, cap * t)
    source = tl.load(along_p_ptr + row) * tl.exp(z - tl.load(row_max_ptr + row)) - tl.load(along_uniform_ptr + row)
    source = tl.where(lanes == index, source - tl.load(along_target_ptr + row), source)
    if SOFTCAP and SLOPE:
        source = source * slope
    tl.store(out_ptr + row * out_stride + lanes, tl.where(inside, source, 0.0), mask=lanes < columns)


@triton.jit  # type: ignore[untyped-decorator]
def row_exp_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    max_index_ptr: tl.tensor,
    row_max_ptr: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    vocab: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    exp_scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row and block: E = exp_scale·exp(z − m), times the slope of the softcap, rounded to the dtype of
    `out`; 0 in a row whose m is not finite. The first column with z = m goes to `max_index`.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < vocab
    z = tl.load(logits_ptr + row * row_stride + lanes, mask=inside, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        t, slope = tanh_and_slope(z / cap)
        z = tl.where(z == -float("inf"), z, cap * t)
    row_max = tl.load(row_max_ptr + row)
    e = tl.exp(z - row_max)
    # A row without a finite maximum has no E: 0, and not NaN.
    e = tl.where(tl.abs(row_max) < float("inf"), e, 0.0)
    first = tl.min(tl.where(inside & (z == row_max), lanes, vocab), axis=0)
    # `max_index` holds vocab − 1 at the start; most blocks do not touch it.
    if first < vocab:
        tl.atomic_min(max_index_ptr + row, first)
    if SOFTCAP:
        e = e * slope
    e = e * exp_scale
    tl.store(out_ptr + row * out_stride + lanes, e.to(out_ptr.dtype.element_ty), mask=inside)


INTERPRETED = not isinstance(row_statistics_kernel, triton.JITFunction)
"""Whether TRITON_INTERPRET=1 was set when this module was imported: Triton decides it there, once."""
