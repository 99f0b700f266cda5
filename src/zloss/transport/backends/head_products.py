"""The products of a loss with the head W, in compute precision and without a second copy of the whole head.

A head that is already in compute precision is used as it is; a 16-bit (or autocast) head is converted one block of
the vocabulary at a time. Products are always formed and accumulated in fp32 or better, so logits never exist in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

_BLOCK_BYTES = 2**25
"""Size of the converted block: small beside the logit buffer, large enough that the product dominates the conversion."""


class HeadProducts:
    """h Wᵀ, E W, W[y] and w̄ of a head W [V, D], formed a block of the vocabulary at a time."""

    def __init__(self, weight_VD: Tensor, dtype: torch.dtype, rounding: torch.dtype | None) -> None:
        self._weight_VD = weight_VD.detach()
        self._dtype = dtype
        self._rounding = None if rounding == weight_VD.dtype else rounding
        self._whole = weight_VD.dtype == dtype and self._rounding is None
        self.vocab, self.width = weight_VD.shape

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        if self._whole:
            yield slice(0, self.vocab), self._weight_VD
            return
        step = max(1, _BLOCK_BYTES // max(1, self.width * self._dtype.itemsize))
        for start in range(0, self.vocab, step):
            block = slice(start, min(start + step, self.vocab))
            yield block, self._convert(self._weight_VD[block])

    def _convert(self, weight_VD: Tensor) -> Tensor:
        return (weight_VD if self._rounding is None else weight_VD.to(self._rounding)).to(self._dtype)

    def logits_(self, hidden_CD: Tensor, out_CV: Tensor) -> None:
        """out = h Wᵀ."""
        for block, weight in self._blocks():
            torch.mm(hidden_CD, weight.t(), out=out_CV[:, block])

    def takes_narrow(self, hidden_CD: Tensor) -> bool:
        """Whether 16-bit operands can be multiplied as they are, into fp32: on CUDA, whose tensor cores do that."""
        operand = self._rounding or self._weight_VD.dtype
        return (
            hidden_CD.is_cuda
            and torch.version.hip is None
            and self._dtype == torch.float32
            and hidden_CD.dtype == operand
            and operand in (torch.bfloat16, torch.float16)
        )

    def narrow_logits_(self, hidden_CD: Tensor, out_CV: Tensor) -> None:
        """out = h Wᵀ in fp32 from 16-bit operands, whose products are exact and summed in fp32."""
        torch.mm(hidden_CD, self._narrow_VD.t(), out_dtype=torch.float32, out=out_CV)

    @cached_property
    def _narrow_VD(self) -> Tensor:
        """The head in 16 bits; for a master weight in fp32 one rounded copy, as autocast keeps it too."""
        return self._weight_VD if self._rounding is None else self._weight_VD.to(self._rounding)

    def back_project(self, e_CV: Tensor) -> Tensor:
        """E W, which is S·Wᵀp for E = S·p: the product that both the gain and dh need."""
        out_CD = e_CV.new_zeros(e_CV.shape[0], self.width)
        for block, weight in self._blocks():
            out_CD.addmm_(e_CV[:, block], weight, beta=0 if block.start == 0 else 1)
        return out_CD

    def select(self, index_C: Tensor) -> Tensor:
        """W[y] in compute precision."""
        return self._convert(self._weight_VD.index_select(0, index_C))

    def mean(self) -> Tensor:
        """w̄, the mean row."""
        if self._whole:
            return self._weight_VD.mean(dim=0)
        total_D = self._weight_VD.new_zeros(self.width, dtype=self._dtype)
        for _, weight in self._blocks():
            total_D += weight.sum(dim=0)
        return total_D / self.vocab
