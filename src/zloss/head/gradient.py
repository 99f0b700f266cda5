"""Gradients of several losses at the head's weight and bias, a block of vocabulary rows at a time.

With δ = a·p − b·onehot(y) − g/V, dW = s·Σ_t δ_t u_tᵀ and db = s·Σ_t δ_t. For tokens whose log Z is known, the rows of a
block need only those rows of W, so inner products of whole head gradients are formed without holding one.

Axes: T tokens, V vocabulary, R rows of a block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.head.arguments import HeadProblem
from zloss.head.products import HeadProducts
from zloss.head.rows import softcap_
from zloss.objectives import Coefficients

_BLOCK_BYTES = 2**25
"""Size of the [T, R] block of probabilities."""


@dataclass(frozen=True)
class HeadGradientRows:
    """The gradient of one loss at a block of rows."""

    weight_RD: Tensor
    bias_R: Tensor | None
    """None for a head without bias."""


@torch.no_grad()
def head_gradient_rows(
    problem: HeadProblem, log_z_T: Tensor, losses: Mapping[str, Coefficients]
) -> Iterator[tuple[slice, dict[str, HeadGradientRows]]]:
    """(rows, gradient of each loss at those rows), over all rows inside log Z. Coefficients include the reduction weight."""
    options, vocab = problem.options, problem.vocab
    rounded_TD = problem.hidden_TD.detach()
    rounded_TD = rounded_TD if problem.rounding is None else rounded_TD.to(problem.rounding)
    hidden_TD = rounded_TD.to(problem.dtype) * options.logit_scale
    bias_V = problem.scaled_bias()
    scale_T1 = hidden_TD.new_full((hidden_TD.shape[0], 1), options.logit_scale)
    tokens = max(1, hidden_TD.shape[0])
    step = max(1, _BLOCK_BYTES // (tokens * problem.dtype.itemsize))
    for start in range(0, vocab, step):
        rows = slice(start, min(start + step, vocab))
        # Operands are already rounded to the autocast dtype; from there on nothing may be rounded again.
        with torch.autocast(hidden_TD.device.type, enabled=False):
            block = _Block(problem, rows, log_z_T, hidden_TD, bias_V)
            gradients = {
                name: HeadGradientRows(
                    block.gradient(coefficients, hidden_TD),
                    None if bias_V is None else block.gradient(coefficients, scale_T1).squeeze(1),
                )
                for name, coefficients in losses.items()
            }
        yield rows, gradients


class _Block:
    """δ of all tokens at a block of rows, as a factor of the gradients."""

    def __init__(
        self, problem: HeadProblem, rows: slice, log_z_T: Tensor, hidden_TD: Tensor, bias_V: Tensor | None
    ) -> None:
        """`hidden_TD` and `bias_V` carry the logit scale."""
        index_T, softcap = problem.targets.index_T, problem.options.softcap
        self._vocab = problem.vocab
        self._here_T = (index_T >= rows.start) & (index_T < rows.stop)
        """Tokens whose target is one of the rows."""
        self._local = index_T[self._here_T] - rows.start
        self._slope: Tensor | None = None
        """Slope of the softcap at those targets; None without a softcap."""
        p_TR = hidden_TD.new_empty((hidden_TD.shape[0], rows.stop - rows.start))
        HeadProducts(problem.weight_VD[rows], problem.dtype, problem.rounding).logits_(hidden_TD, p_TR)
        if bias_V is not None:
            p_TR += bias_V[rows]
        slope_TR = None
        if softcap is not None:
            slope_TR = torch.empty_like(p_TR)
            softcap_(p_TR, slope_TR, softcap)
            self._slope = slope_TR[self._here_T, self._local]
        p_TR.sub_(log_z_T.unsqueeze(1)).exp_()
        self._p_TR = p_TR if slope_TR is None else p_TR.mul_(slope_TR)
        """p, times the slope of the softcap where there is one."""

    def gradient(self, coefficients: Coefficients, input_TD: Tensor) -> Tensor:
        """Σ_t δ_t input_tᵀ at the rows, [R, D]: the input of the weight is s·u, that of the bias is s."""
        grad_RD = self._p_TR.T @ (input_TD * coefficients.a.unsqueeze(1))
        if coefficients.b is not None:
            weight = coefficients.b[self._here_T]
            weight = weight if self._slope is None else weight * self._slope
            grad_RD.index_add_(0, self._local, input_TD[self._here_T] * weight.unsqueeze(1), alpha=-1)
        if coefficients.g is not None:
            grad_RD.sub_((coefficients.g @ input_TD) / self._vocab)
        return grad_RD
