"""Gradients of several losses at the head weight, a block of vocabulary rows at a time.

For tokens whose log Z is known, dW[rows] = s·(a·p[rows] − b·onehot − g/V)ᵀ u needs only those rows of W, so inner products
between whole head gradients can be formed without holding a whole gradient.

Axes: T tokens, V vocabulary, R rows of a block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.head_problem import HeadProblem
from zloss.transport.softcap import softcap_

_BLOCK_BYTES = 2**25
"""Size of the [T, R] block of probabilities."""


@dataclass(frozen=True)
class SourceCoefficients:
    """δ_t = along_p·p − along_target·onehot(y) − along_uniform/V, the reduction weight included."""

    along_p_T: Tensor
    along_target_T: Tensor | None = None
    along_uniform_T: Tensor | None = None


@torch.no_grad()
def head_gradient_rows(
    problem: HeadProblem, log_z_T: Tensor, sources: Mapping[str, SourceCoefficients]
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """(rows, gradient of each source at those rows), over all rows inside log Z."""
    options, vocab, index_T = problem.options, problem.vocab, problem.targets.index_T
    hidden_TD = problem.hidden_TD.detach().to(problem.dtype) * options.logit_scale
    bias_V = None if problem.bias_V is None else problem.bias_V.detach()[:vocab].to(problem.dtype) * options.logit_scale
    tokens = max(1, hidden_TD.shape[0])
    step = max(1, _BLOCK_BYTES // (tokens * problem.dtype.itemsize))
    for start in range(0, vocab, step):
        rows = slice(start, min(start + step, vocab))
        p_TR = hidden_TD.new_empty((hidden_TD.shape[0], rows.stop - rows.start))
        HeadProducts(problem.weight_VD[rows], problem.dtype, problem.rounding).logits_(hidden_TD, p_TR)
        if bias_V is not None:
            p_TR += bias_V[rows]
        slope_TR = None
        if options.softcap is not None:
            slope_TR = torch.empty_like(p_TR)
            softcap_(p_TR, slope_TR, options.softcap)
        p_TR.sub_(log_z_T.unsqueeze(1)).exp_()
        if slope_TR is not None:
            p_TR.mul_(slope_TR)
        here_T = (index_T >= rows.start) & (index_T < rows.stop)
        gradients = {}
        for name, source in sources.items():
            grad_RD = p_TR.T @ (hidden_TD * source.along_p_T.unsqueeze(1))
            if source.along_target_T is not None:
                weight_T = source.along_target_T[here_T]
                local_T = index_T[here_T] - rows.start
                if slope_TR is not None:
                    weight_T = weight_T * slope_TR[here_T, local_T]
                grad_RD.index_add_(0, local_T, hidden_TD[here_T] * weight_T.unsqueeze(1), alpha=-1)
            if source.along_uniform_T is not None:
                grad_RD.sub_((source.along_uniform_T @ hidden_TD) / vocab)
            gradients[name] = grad_RD
        yield rows, gradients
