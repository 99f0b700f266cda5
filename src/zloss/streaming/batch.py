"""Batches of values as flat numpy arrays, in slices small enough that a large batch costs no large copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zloss.errors import DtypeError, ShapeError

SLICE = 1 << 17
"""Values converted at once; temporaries of an update stay near a megabyte each."""

FloatArray = NDArray[np.float32] | NDArray[np.float64]
Flat = Tensor | NDArray[Any]


def flatten(values: Any, name: str = "values") -> Flat:
    """`values` as one axis, without a copy where the layout allows, its dtype checked but not yet converted."""
    if isinstance(values, Tensor):
        if values.dtype.is_complex or values.dtype == torch.bool:
            raise DtypeError(f"`{name}` is expected to hold real numbers, but got {values.dtype}.")
        return values.detach().reshape(-1)
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise DtypeError(f"`{name}` is expected to hold real numbers, but got dtype {array.dtype}.")
    return array.reshape(-1)


def as_floats(part: Flat) -> FloatArray:
    """fp32 and fp64 as they are; narrower floats exactly, as fp32; integers and wider floats as fp64."""
    if isinstance(part, Tensor):
        if part.dtype == torch.float64 or not part.dtype.is_floating_point:
            wide: NDArray[np.float64] = part.to(torch.float64).cpu().numpy()
            return wide
        narrow: NDArray[np.float32] = part.to(torch.float32).cpu().numpy()
        return narrow
    if part.dtype in (np.float16, np.float32):
        return part.astype(np.float32, copy=False)
    return part.astype(np.float64, copy=False)


def flatten_integers(values: Any, name: str) -> Flat:
    """Integers as one axis; floats are refused, because positions past 2^24 would have been rounded in fp32."""
    flat = flatten(values, name)
    integral = not flat.dtype.is_floating_point if isinstance(flat, Tensor) else flat.dtype.kind in "iu"
    if flat.shape[0] and not integral:
        raise DtypeError(f"`{name}` is expected to hold integers, but got {flat.dtype}.")
    return flat


def as_integers(part: Flat) -> NDArray[np.int64]:
    """Integers as int64."""
    array: NDArray[Any] = part.cpu().numpy() if isinstance(part, Tensor) else part
    return array.astype(np.int64, copy=False)


def slices(size: int) -> Iterator[slice]:
    """Consecutive slices that cover `size` values."""
    for start in range(0, size, SLICE):
        yield slice(start, min(start + SLICE, size))


def length(**columns: Flat) -> int:
    """The common number of values of flat columns."""
    sizes = {name: int(column.shape[0]) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise ShapeError(f"one value per item is expected in every column, but got the lengths {sizes}.")
    return next(iter(sizes.values()), 0)
