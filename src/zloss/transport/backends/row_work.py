"""What a backend does to one chunk of logits between its matrix products: the interface of row work.

A row is the row of one token in the [T, V] matrix of logits. `TorchRows` does the work in plain PyTorch, `TritonRows` in
kernels.

Axes: C tokens of a chunk, V vocabulary, B buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zloss.source.injection import WeightedSource
from zloss.transport.backends.product_plan import ProductPlan


@dataclass(frozen=True)
class RowSums:
    """m = max z, S = Σ exp(z − m) and √Σ exp(z − m)² of every row, so that ‖p‖₂ = norm / S."""

    row_max_C: Tensor
    sum_C: Tensor
    norm_C: Tensor | None
    drop_C: Tensor | None = None
    """Σ exp(z − m)·(m − z), so that the entropy is log S + drop / S."""


@dataclass(frozen=True)
class RowPass:
    """One chunk of logits after its statistics."""

    sums: RowSums
    target_logit_C: Tensor
    mean_logit_C: Tensor | None
    e_CV: Tensor
    """E = exp(z − m), times the slope of the softcap where there is one, as the products with W and h take it: in compute
    precision, or in 16 bits times the scale of the product plan."""
    source_CV: Tensor
    """The buffer from which the same RowWork forms a source: E, or the logits themselves."""
    slope_CV: Tensor | None = None
    """The slope of the softcap, where it was asked for and is kept apart."""
    max_index_C: Tensor | None = None
    """Column of the largest logit, the first one among equals; None where E stays in compute precision."""


_ALIGNMENT = 64
"""On a GPU rows start at multiples of 64 entries: tensor cores read 16 bytes at once, and V = 50257 is odd."""


def empty_rows(count: int, tokens: int, vocab: int, dtype: torch.dtype, plan: ProductPlan, like: Tensor) -> Tensor:
    """Room for `count` V-wide tensors of a chunk, [count, C, V] on the device of `like`."""
    columns = -(-vocab // _ALIGNMENT) * _ALIGNMENT if plan.device_type == "cuda" else vocab
    return torch.empty((count, tokens, columns), dtype=dtype, device=like.device)[:, :, :vocab]


def empty_narrow(plan: ProductPlan, tokens: int, vocab: int, like: Tensor) -> Tensor | None:
    """Room for the E of a chunk in 16 bits, [C, V]; None where it stays in compute precision."""
    return empty_rows(1, tokens, vocab, plan.factor, plan, like)[0] if plan.narrow else None


class RowWork(Protocol):
    """The V-wide work on one chunk of final logits."""

    buffers: int
    """V-wide buffers per chunk in compute precision; the first holds the logits."""
    plan: ProductPlan
    """How the products take E."""

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
        """Softcap, statistics and E; the buffers are consumed. `narrow_CV` receives E where the products take it in 16 bits.

        `norm`, `mean`, `drop`: which optional sums are needed.
        """
        ...

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        """along_exp·E − along_target·onehot(y) − along_uniform/V as [C, V], 0 at ignored tokens; `rows` is consumed.

        E is the one of `applied_exp`: rounded as the products take it. `through_softcap` multiplies by the slope of the
        softcap: the source at the logits before it.
        """
        ...
