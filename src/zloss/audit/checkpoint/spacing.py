"""Distances between neighbouring floats at the row maximum (paper eq:precision_link)."""

from __future__ import annotations

import math

from zloss.results.audit import Spacing

FP16_MAX = 65504.0


def spacing(row_max: float | None) -> Spacing:
    """Distance between neighbouring bf16 and fp16 numbers at `row_max`; None for fp16 where it overflows."""
    if row_max is None or not row_max:
        return Spacing(row_max_999=row_max)
    exponent = math.floor(math.log2(abs(row_max)))
    fp16 = 2.0 ** (max(exponent, -14) - 10) if abs(row_max) <= FP16_MAX else None
    return Spacing(row_max, bf16_spacing=2.0 ** (exponent - 7), fp16_spacing=fp16)
