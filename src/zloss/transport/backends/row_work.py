"""What a backend does to one chunk of logits between its matrix products: the interface of row work.

A row is the row of one token in the [T, V] matrix of logits. `TorchRows` does the work in plain PyTorch, `TritonRows` in
kernels.

Axes: C tokens of a chunk, V vocabulary, B buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zloss.source.injection import WeightedSource


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
    shaped_CV: Tensor
    """E = exp(z − m), times the slope of the softcap where there is one: what the products with W and h take."""
    source_CV: Tensor
    """The buffer from which the same RowWork forms a source: E, or the logits themselves."""
    slope_CV: Tensor | None = None
    """The slope of the softcap, where it was asked for and is kept apart."""


class RowWork(Protocol):
    """The V-wide work on one chunk of final logits."""

    buffers: int
    """V-wide buffers per chunk; the first holds the logits."""

    def statistics(
        self, buffers_BCV: Tensor, index_C: Tensor, *, norm: bool, mean: bool, drop: bool = False
    ) -> RowPass:
        """Softcap, statistics and E; the buffers are consumed. `norm`, `mean`, `drop`: which optional sums are needed."""
        ...

    def source(
        self, rows: RowPass, index_C: Tensor, valid_C: Tensor, source: WeightedSource, *, through_softcap: bool
    ) -> Tensor:
        """along_exp·E − along_target·onehot(y) − along_uniform/V as [C, V], 0 at ignored tokens; `rows` is consumed.

        `through_softcap` multiplies by the slope of the softcap: the source at the logits before it.
        """
        ...
