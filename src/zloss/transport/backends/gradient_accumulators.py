"""dh, dW and db of a head loss, accumulated over chunks in compute precision.

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.source.injection import weighted_source
from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.head_problem import HeadProblem


class GradientAccumulators:
    """The wanted ones of dh, dW and db."""

    def __init__(self, problem: HeadProblem, wanted: tuple[bool, ...]) -> None:
        self._problem = problem
        self._head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
        self._started = False
        dtype, device = problem.dtype, problem.hidden_TD.device
        rows, width = problem.weight_VD.shape
        hidden, weight, bias = wanted
        self._hidden_TD = torch.empty(problem.hidden_TD.shape, dtype=dtype, device=device) if hidden else None
        self._weight_VD = torch.empty(rows, width, dtype=dtype, device=device) if weight else None
        self._bias_V = torch.zeros(rows, dtype=dtype, device=device) if bias else None
        self._uniform_D = torch.zeros(width, dtype=dtype, device=device)
        self._uniform = torch.zeros((), dtype=dtype, device=device)
        self._has_uniform = False

    def add(self, chunk: HeadChunk, weight_C: Tensor) -> None:
        """Add the gradients of Σ weight·(CE + aux) over the chunk; its E W is consumed."""
        source = weighted_source(chunk.injection, chunk.rows.sums.sum_C, chunk.stats.valid, weight_C)
        p_C, target_C, uniform_C = source.along_exp_C, source.along_target_C, source.along_uniform_C
        assert target_C is not None
        if chunk.target_slope_C is not None:
            target_C = torch.where(chunk.stats.valid, target_C * chunk.target_slope_C, target_C.new_zeros(()))
        self._has_uniform = self._has_uniform or uniform_C is not None
        if self._hidden_TD is not None:
            assert chunk.projected_CD is not None
            grad_CD = chunk.projected_CD.mul_(p_C.unsqueeze(1))
            grad_CD.addcmul_(self._head.select(chunk.index_C), target_C.unsqueeze(1), value=-1)
            if uniform_C is not None:
                assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
                grad_CD.addr_(uniform_C, chunk.mean_row_D, alpha=-1)
            self._hidden_TD[chunk.tokens] = grad_CD
        if self._weight_VD is not None:
            # The weights of the tokens multiply the hidden states and not E, which is V wide.
            weighted_CD = chunk.hidden_CD * p_C.unsqueeze(1)
            inside_VD = self._weight_VD[: self._problem.vocab]
            inside_VD.addmm_(chunk.rows.shaped_CV.t(), weighted_CD, beta=1 if self._started else 0)
            self._weight_VD.index_add_(0, chunk.index_C, chunk.hidden_CD * target_C.unsqueeze(1), alpha=-1)
            if uniform_C is not None:
                self._uniform_D += uniform_C @ chunk.hidden_CD
        if self._bias_V is not None:
            self._bias_V[: self._problem.vocab].addmv_(chunk.rows.shaped_CV.t(), p_C)
            self._bias_V.index_add_(0, chunk.index_C, target_C, alpha=-1)
            if uniform_C is not None:
                self._uniform += uniform_C.sum()
        self._started = True

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk."""
        vocab, scale = self._problem.vocab, self._problem.options.logit_scale
        if self._weight_VD is not None:
            if not self._started:
                self._weight_VD.zero_()
            self._weight_VD[vocab:].zero_()
            if self._has_uniform:
                self._weight_VD[:vocab].sub_(self._uniform_D / vocab)
        if self._bias_V is not None:
            if self._has_uniform:
                self._bias_V[:vocab].sub_(self._uniform / vocab)
            self._bias_V.mul_(scale)
        if self._hidden_TD is not None and scale != 1:
            self._hidden_TD.mul_(scale)
        return self._hidden_TD, self._weight_VD, self._bias_V
