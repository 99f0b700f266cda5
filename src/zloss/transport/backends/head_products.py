"""The products of a loss with the head W, without a second copy of the whole head in compute precision.

A head that is already in the dtype of its products is used as it is; otherwise it is converted one block of the
vocabulary at a time. Sums are fp32 or better, so logits never exist in 16 bits.

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zloss.transport.backends.narrow_parts import power_of_two
from zloss.transport.backends.product_plan import ProductPlan, fp32_plan
from zloss.transport.backends.products import accumulate, multiply

_BLOCK_BYTES = 2**25
"""Size of the converted block: small beside the logit buffer, large enough that the product dominates the conversion."""
_COPY_EXPONENT = 15
"""The largest |W| of an fp16 copy is below 2¹⁵, half of what fp16 holds; down to 2⁻²⁹ of it entries are exact."""


class HeadProducts:
    """h Wᵀ, E W, Eᵀx, W[y] and w̄ of a head W [V, D], as a plan says."""

    def __init__(
        self, weight_VD: Tensor, dtype: torch.dtype, rounding: torch.dtype | None, plan: ProductPlan | None = None
    ) -> None:
        self._weight_VD = weight_VD.detach()
        self._dtype = dtype
        self._rounding = None if rounding == weight_VD.dtype else rounding
        self._whole = weight_VD.dtype == dtype and self._rounding is None
        self._plan = fp32_plan(dtype) if plan is None else plan
        self._narrow_VD: Tensor | None = None
        self._factor_VD: Tensor | None = None
        self._unit: Tensor | None = None
        self.vocab, self.width = weight_VD.shape

    def _ranges(self) -> Iterator[slice]:
        step = max(1, self.vocab) if self._whole else max(1, _BLOCK_BYTES // max(1, self.width * self._dtype.itemsize))
        for start in range(0, self.vocab, step):
            yield slice(start, min(start + step, self.vocab))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """W in compute precision, block by block."""
        for block in self._ranges():
            yield block, self._convert(self._weight_VD[block])

    def _convert(self, weight_VD: Tensor) -> Tensor:
        return (weight_VD if self._rounding is None else weight_VD.to(self._rounding)).to(self._dtype)

    # The three below are kept in plain attributes: torch.compile does not enter the lock of a cached_property.

    def _narrow(self) -> Tensor:
        """The head in 16 bits; for a master weight in fp32 one rounded copy, as autocast keeps it too."""
        if self._rounding is None:
            return self._weight_VD
        if self._narrow_VD is None:
            self._narrow_VD = self._weight_VD.to(self._rounding)
        return self._narrow_VD

    def _copy_unit(self) -> Tensor | None:
        """The power of two that scales the largest |W| to 2¹⁵ where E W takes an fp16 copy of a bf16 head; else None."""
        plan = self._plan
        if not plan.narrow or plan.operand == plan.factor or not self.vocab:
            return None
        if self._unit is None:
            largest = torch.linalg.vector_norm(self._weight_VD, torch.inf, dtype=self._dtype)
            self._unit = power_of_two(largest, _COPY_EXPONENT)
        return self._unit

    def _factor(self) -> Tensor:
        """The head as the product E W takes it on a GPU: in 16 bits, as it is or as a copy in units of its own."""
        unit = self._copy_unit()
        if unit is None:
            return self._narrow()
        if self._factor_VD is None:
            narrow_VD = self._narrow()
            self._factor_VD = torch.empty_like(narrow_VD, dtype=self._plan.factor)
            torch.mul(narrow_VD, unit, out=self._factor_VD)
        return self._factor_VD

    def _as_factor(self, weight_VD: Tensor) -> Tensor:
        """A block of W in compute precision with the entries of `_factor`."""
        unit = self._copy_unit()
        return weight_VD if unit is None else (weight_VD * unit).to(self._plan.factor).to(self._dtype)

    def logits_(self, hidden_CD: Tensor, out_CV: Tensor) -> None:
        """out = h Wᵀ, for h in compute precision, or in 16 bits where the plan is native."""
        if hidden_CD.dtype != self._dtype:
            multiply(hidden_CD, self._narrow().t(), out_CV)
            return
        for block, weight in self._blocks():
            multiply(hidden_CD, weight.t(), out_CV[:, block])

    def back_project(self, e_CV: Tensor) -> Tensor:
        """E W in compute precision, which is S·Wᵀp for E = S·p: the product that both the gain and dh need.

        `e_CV` is E times the plan's scale.
        """
        plan = self._plan
        out_CD = e_CV.new_zeros(e_CV.shape[0], self.width, dtype=self._dtype)
        if plan.narrow and plan.native:
            accumulate(out_CD, e_CV, self._factor(), plan, first=True)
        else:
            for block, weight in self._blocks():
                accumulate(
                    out_CD, e_CV[:, block].to(self._dtype), self._as_factor(weight), plan, first=block.start == 0
                )
        unit = self._copy_unit()
        if unit is not None:
            out_CD.div_(unit)
        return out_CD if plan.exp_scale == 1 else out_CD.mul_(1 / plan.exp_scale)

    def add_outer_(self, total_VX: Tensor, e_CV: Tensor, factor_CX: Tensor, *, first: bool) -> None:
        """total += Eᵀ x for x = `factor_CX`; `first` overwrites the total."""
        plan = self._plan
        alpha = 1 / plan.exp_scale
        if not plan.narrow or plan.native:
            accumulate(total_VX, e_CV.t(), factor_CX, plan, first=first, alpha=alpha)
            return
        wide_CX = factor_CX.to(self._dtype)
        for block in self._ranges():
            accumulate(total_VX[block], e_CV[:, block].to(self._dtype).t(), wide_CX, plan, first=first, alpha=alpha)

    def select(self, index_C: Tensor) -> Tensor:
        """W[y] in compute precision."""
        rows_CD = self._weight_VD.index_select(0, index_C)
        return (rows_CD if self._rounding is None else rows_CD.to(self._rounding)).to(self._dtype)

    def mean(self) -> Tensor:
        """w̄, the mean row."""
        if self._whole:
            return self._weight_VD.mean(dim=0)
        if self._plan.native:
            return self._narrow().sum(dim=0, dtype=self._dtype) / self.vocab
        total_D = self._weight_VD.new_zeros(self.width, dtype=self._dtype)
        for _, weight in self._blocks():
            total_D += weight.sum(dim=0)
        return total_D / self.vocab
