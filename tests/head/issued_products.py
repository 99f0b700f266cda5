"""The matrix products that some code issues, as the dispatcher sees them: on the meta device too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Product(NamedTuple):
    operand: torch.dtype
    """Dtype of the factors."""
    shape: tuple[int, int, int]
    """[M, K, N] of [M, K] @ [K, N]."""


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten.mm", "aten.addmm")):
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            assert left.dtype == right.dtype
            self.seen.append(Product(left.dtype, (left.shape[0], left.shape[1], right.shape[1])))
        return func(*args, **(kwargs or {}))


@contextmanager
def issued_products() -> Iterator[list[Product]]:
    """The list that receives every matrix product issued inside the block, in order."""
    with _Products() as mode:
        yield mode.seen
