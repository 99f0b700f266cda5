"""The factor s∘h of dW = Eᵀ(s∘h) − onehotᵀ(b∘h), as the products take it, with s = w·a/S.

In 16 bits the product takes x = round(s∘h). That loses what distinguishes a from 1: a Z-loss of λ = 1e-4 changes s by
2e-3, one rounding step of bf16. Where E is large this would be lost for good, so on the rows of the target and of the
largest logit, where E is of the size of 1, the residue E·(s∘h − x) is added back in compute precision. On all other rows
E is small and the roundings of many tokens average out. "split" keeps s∘h as hi + lo instead.

fp16 has a narrow range and s∘h is small (w is 1/tokens, S up to V), so x is multiplied by a power of two, one for all
chunks, and dW is divided by it at the end.

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.narrow_parts import narrowed
from zloss.transport.backends.products import wide_pass
from zloss.transport.head_problem import HeadProblem

_FP16_EXPONENT = 4
"""max |w∘h| is scaled to 2⁴ in fp16. Above are 12 binary orders for a, below 18 for 1/S and for small entries of h."""
_BIAS_PARTS = 3
"""Parts of s in the product for db: a vector may be exact."""
_BIAS_COLUMNS = 8
"""Columns of that product: tensor cores take multiples of 8."""


class WeightFactors:
    """Adds the chunks of dW and db as the product plan of a problem says."""

    def __init__(self, problem: HeadProblem, weight_T: Tensor) -> None:
        self._plan = problem.products
        self._unit = self._unit_of_weight = None
        if self._plan.parts and self._plan.operand == torch.float16 and weight_T.numel():
            width = problem.largest_hidden().float() * abs(problem.options.logit_scale)
            largest = weight_T.detach().abs().amax()
            self._unit, self._unit_of_weight = _power_of_two(largest * width), _power_of_two(largest)

    def enter_(self, given_VD: Tensor) -> Tensor:
        """A given buffer in the unit in which chunks are added."""
        return given_VD if self._unit is None else given_VD.mul_(self._unit)

    def leave_(self, weight_VD: Tensor) -> None:
        """dW in the unit of the gradient."""
        if self._unit is not None:
            weight_VD.div_(self._unit)
            wide_pass("dW out of its fp16 unit", (weight_VD,), (weight_VD,))

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
        if not self._plan.parts:
            head.add_outer_(inside_VD, rows.shaped, (weighted_CD,), first=first)
            inside_VD.index_add_(0, chunk.index_C, picked_CD, alpha=-1)
            return
        assert self._plan.operand is not None
        factors = narrowed(weighted_CD, self._plan.operand, self._plan.parts)
        head.add_outer_(inside_VD, rows.shaped, factors, first=first)
        if self._plan.kind == "operand":
            assert rows.max_index_C is not None
            residue_CD = weighted_CD.sub_(factors[0])
            picked_CD.addcmul_(residue_CD, _entries(rows.shaped, chunk.index_C, self._plan.exp_scale), value=-1)
            elsewhere_C1 = (rows.max_index_C != chunk.index_C).unsqueeze(1)
            residue_CD.mul_(_entries(rows.shaped, rows.max_index_C, self._plan.exp_scale) * elsewhere_C1)
            inside_VD.index_add_(0, rows.max_index_C, residue_CD)
        inside_VD.index_add_(0, chunk.index_C, picked_CD, alpha=-1)

    def add_bias_(self, inside_V: Tensor, head: HeadProducts, chunk: HeadChunk, p_C: Tensor) -> None:
        """db += Eᵀp."""
        if not inside_V.shape[0]:
            return
        if not self._plan.parts:
            inside_V.addmv_(chunk.rows.shaped[0].t(), p_C)
            wide_pass("Eᵀs", (chunk.rows.shaped[0],))
            return
        assert self._plan.operand is not None
        unit = p_C.new_ones(()) if self._unit_of_weight is None else self._unit_of_weight
        factor_CX = torch.zeros((p_C.shape[0], _BIAS_COLUMNS), dtype=self._plan.operand, device=p_C.device)
        for column, part_C in enumerate(narrowed(p_C * unit, self._plan.operand, _BIAS_PARTS)):
            factor_CX[:, column] = part_C
        total_VX = torch.empty((inside_V.shape[0], _BIAS_COLUMNS), dtype=inside_V.dtype, device=inside_V.device)
        for position, part_CV in enumerate(chunk.rows.shaped):
            head.add_outer_(total_VX, (part_CV,), (factor_CX,), first=position == 0)
        inside_V.add_(total_VX.sum(dim=1) / unit)


def _entries(parts: tuple[Tensor, ...], index_C: Tensor, exp_scale: float) -> Tensor:
    """E[t, index_t] as the product took it, [C, 1] in fp32."""
    return parts[0].gather(1, index_C.unsqueeze(1)).float() / exp_scale


def _power_of_two(largest: Tensor) -> Tensor:
    """The power of two that scales `largest` to 2⁴ at most; 1 for 0 and for what is not finite."""
    exponent = _FP16_EXPONENT - torch.frexp(largest).exponent
    usable = torch.isfinite(largest) & (largest > 0)
    return torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent.clamp(-100, 100)), 1.0)
