"""The factor s∘h of dW = Eᵀ(s∘h) − onehotᵀ(b∘h), as the products take it, with s = w·a/S.

In 16 bits the product takes x = round(s∘h). That loses much of what distinguishes a from 1: a Z-loss of λ = 1e-4 changes
s by 2e-3, which is four times the largest rounding error of fp16. So on the rows of the target and of the largest logit,
where E is of the size of 1, the residue E·(s∘h − x) is added back in compute precision. On all other rows E is small and
the roundings of many tokens average out.

fp16 has a narrow range and s∘h is small (w is 1/tokens, S up to V), so x is multiplied by a power of two, one for all
chunks, and dW is divided by it at the end.

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.narrow_parts import power_of_two
from zloss.transport.head_problem import HeadProblem

_EXPONENT = 4
"""max |w∘h| is scaled to 2⁴ in fp16. Above are 12 binary orders: dW of a token with a/S > 4096 is infinite. Below are 18
for 1/S and for small entries of h, and 10 in which they lose a digit each."""
_BIAS_PARTS = 3
"""Parts of s in the product for db: a vector may be exact."""
_BIAS_COLUMNS = 8
"""Columns of that product: tensor cores take multiples of 8."""


class WeightFactors:
    """Adds the chunks of dW and db as the product plan of a problem says."""

    def __init__(self, problem: HeadProblem, weight_T: Tensor) -> None:
        self._plan = problem.products
        self._unit: Tensor | None = None
        self._unit_of_weight: Tensor | None = None
        if self._plan.narrow and weight_T.numel():
            width = problem.largest_hidden().float() * abs(problem.options.logit_scale)
            largest = weight_T.detach().abs().amax()
            self._unit = power_of_two(largest * width, _EXPONENT)
            self._unit_of_weight = power_of_two(largest, _EXPONENT)

    @property
    def scaled(self) -> bool:
        """Whether chunks are added in a unit other than the gradient's."""
        return self._unit is not None

    def enter_(self, given_VD: Tensor) -> None:
        """Put a given buffer into the unit in which chunks are added."""
        if self._unit is not None:
            given_VD.mul_(self._unit)

    def leave(self, weight_VD: Tensor, uniform_D: Tensor | None, out_VD: Tensor) -> None:
        """out = dW in the unit of the gradient, less its part along 1/V, in one pass; out may be dW itself."""
        if self._unit is not None and uniform_D is not None:
            torch.addcmul(-uniform_D, weight_VD, 1 / self._unit, out=out_VD)
        elif self._unit is not None:
            torch.div(weight_VD, self._unit, out=out_VD)
        elif uniform_D is not None:
            torch.sub(weight_VD, uniform_D, out=out_VD)
        else:
            return

    def add_(
        self, inside_VD: Tensor, head: HeadProducts, chunk: HeadChunk, p_C: Tensor, target_C: Tensor, *, first: bool
    ) -> None:
        """dW += Eᵀ(p∘h) − onehotᵀ(target∘h); the weights of the tokens multiply h and not E, which is V wide."""
        rows, hidden_CD = chunk.rows, chunk.hidden_CD
        if not inside_VD.shape[0]:
            return
        if self._unit is not None:
            hidden_CD = hidden_CD * self._unit
        weighted_CD = hidden_CD * p_C.unsqueeze(1)
        picked_CD = hidden_CD * target_C.unsqueeze(1)
        if not self._plan.narrow:
            head.add_outer_(inside_VD, rows.e_CV, weighted_CD, first=first)
            inside_VD.index_add_(0, chunk.index_C, picked_CD, alpha=-1)
            return
        factor_CD = weighted_CD.to(self._plan.factor)
        head.add_outer_(inside_VD, rows.e_CV, factor_CD, first=first)
        assert rows.max_index_C is not None
        residue_CD = weighted_CD.sub_(factor_CD)
        picked_CD.addcmul_(residue_CD, _entries(rows.e_CV, chunk.index_C, self._plan.exp_scale), value=-1)
        elsewhere_C1 = (rows.max_index_C != chunk.index_C).unsqueeze(1)
        residue_CD.mul_(_entries(rows.e_CV, rows.max_index_C, self._plan.exp_scale) * elsewhere_C1)
        inside_VD.index_add_(0, rows.max_index_C, residue_CD)
        inside_VD.index_add_(0, chunk.index_C, picked_CD, alpha=-1)

    def add_bias_(self, inside_V: Tensor, head: HeadProducts, chunk: HeadChunk, p_C: Tensor) -> None:
        """db += Eᵀp."""
        if not inside_V.shape[0]:
            return
        if not self._plan.narrow:
            inside_V.addmv_(chunk.rows.e_CV.t(), p_C)
            return
        unit = p_C.new_ones(()) if self._unit_of_weight is None else self._unit_of_weight
        factor_CX = torch.zeros((p_C.shape[0], _BIAS_COLUMNS), dtype=self._plan.factor, device=p_C.device)
        rest_C = p_C * unit
        for column in range(_BIAS_PARTS):
            factor_CX[:, column] = rest_C
            rest_C = rest_C - factor_CX[:, column]
        total_VX = torch.empty((inside_V.shape[0], _BIAS_COLUMNS), dtype=inside_V.dtype, device=inside_V.device)
        head.add_outer_(total_VX, chunk.rows.e_CV, factor_CX, first=True)
        inside_V.add_(total_VX.sum(dim=1) / unit)


def _entries(e_CV: Tensor, index_C: Tensor, exp_scale: float) -> Tensor:
    """E[t, index_t] as the product took it, [C, 1] in fp32."""
    return e_CV.gather(1, index_C.unsqueeze(1)).float() / exp_scale
