"""dh, dW and db of a head loss, accumulated over chunks in compute precision.

    dh_t = w_t (a_t · Wᵀp_t − b_t · W[y_t] − g_t · w̄)
    dW   = Σ_t w_t (a_t p_t − b_t onehot(y_t)) u_tᵀ − (1/V) 1 (Σ_t w_t g_t u_t)ᵀ

Axes: C tokens of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zloss.source.injection import weighted_source
from zloss.transport.backends.chunks import HeadChunk
from zloss.transport.backends.head_products import HeadProducts
from zloss.transport.backends.weight_factors import WeightFactors
from zloss.transport.head_problem import HeadProblem


class GradientAccumulators:
    """The wanted ones of dh, dW and db of Σ_t weight_t·(CE_t + aux_t)."""

    def __init__(self, problem: HeadProblem, wanted: tuple[bool, ...], weight_T: Tensor) -> None:
        self._problem, self._weight_T = problem, weight_T
        self._head = HeadProducts(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding, problem.products)
        self._factors = WeightFactors(problem, weight_T)
        dtype, device = problem.dtype, problem.hidden_TD.device
        rows, width = problem.weight_VD.shape
        hidden, weight, bias = wanted
        self._hidden_TD = torch.empty(problem.hidden_TD.shape, dtype=dtype, device=device) if hidden else None
        self._given = weight and problem.weight_grad_buffer is not None
        self._started = self._given
        """Whether dW holds something already; it starts uninitialised where it is not given."""
        self._weight_VD = None
        if self._given:
            assert problem.weight_grad_buffer is not None
            self._weight_VD = problem.weight_grad_buffer
            self._factors.enter_(self._weight_VD[: problem.vocab])
        elif weight:
            self._weight_VD = torch.empty(rows, width, dtype=dtype, device=device)
        self._bias_V = torch.zeros(rows, dtype=dtype, device=device) if bias else None
        self._uniform_D = torch.zeros(width, dtype=dtype, device=device)
        self._uniform = torch.zeros((), dtype=dtype, device=device)
        self._has_uniform = False
        self._sums: list[Any] = []
        """Sums of dh over ranks that are under way."""

    def add(self, chunk: HeadChunk) -> None:
        """Add the gradients of a chunk; its E W is consumed."""
        weight_C = self._weight_T[chunk.tokens]
        source = weighted_source(chunk.injection, chunk.joined.sums.sum_C, chunk.stats.valid, weight_C)
        p_C, target_C, uniform_C = source.along_exp_C, source.along_target_C, source.along_uniform_C
        assert target_C is not None
        if chunk.target_slope_C is not None:
            target_C = torch.where(chunk.stats.valid, target_C * chunk.target_slope_C, target_C.new_zeros(()))
        self._has_uniform = self._has_uniform or uniform_C is not None
        own_p_C, own_target_C = chunk.joined.own_exp(p_C), chunk.joined.own_target(target_C)
        if self._hidden_TD is not None and not chunk.partial:
            whole_CD = self._hidden_gradient(chunk, p_C, target_C, uniform_C)
            if chunk.part is None:
                self._hidden_TD[chunk.tokens] = whole_CD
            else:
                self._hidden_TD[chunk.part.own_rows] = whole_CD[chunk.part.own_in_chunk]
        elif self._hidden_TD is not None:
            shared_C = uniform_C if self._problem.shard.adds_shared_terms else None
            own_CD = self._hidden_gradient(chunk, own_p_C, own_target_C, shared_C)
            # The sum over ranks runs beside the products of this chunk's dW and of the next chunk.
            if chunk.part is None:
                place_CD = self._hidden_TD[chunk.tokens]
                place_CD.copy_(own_CD)
                self._sums.append(self._problem.shard.start_sum_(place_CD))
            else:
                while self._sums:  # what is summed is a buffer of its own here: one at a time
                    self._sums.pop().wait()
                self._sums.append(chunk.part.start_scatter(own_CD, self._hidden_TD))
        if self._weight_VD is not None:
            inside_VD = self._weight_VD[: self._problem.vocab]
            self._factors.add_(inside_VD, self._head, chunk, own_p_C, own_target_C, first=not self._started)
            if uniform_C is not None:
                self._uniform_D += uniform_C @ chunk.hidden_CD
        if self._bias_V is not None:
            self._factors.add_bias_(self._bias_V[: self._problem.vocab], self._head, chunk, own_p_C)
            if self._problem.vocab:
                self._bias_V.index_add_(0, chunk.index_C, own_target_C, alpha=-1)
            if uniform_C is not None:
                self._uniform += uniform_C.sum()
        self._started = True

    def _hidden_gradient(self, chunk: HeadChunk, p_C: Tensor, target_C: Tensor, uniform_C: Tensor | None) -> Tensor:
        """w (a·Wᵀp − b·W[y] − g·w̄); the E W of the chunk is consumed."""
        assert chunk.projected_CD is not None
        grad_CD = chunk.projected_CD.mul_(p_C.unsqueeze(1))
        target_rows_CD = chunk.target_rows_CD
        if target_rows_CD is None and self._problem.vocab:
            target_rows_CD = self._head.select(chunk.index_C)
        if target_rows_CD is not None:
            grad_CD.addcmul_(target_rows_CD, target_C.unsqueeze(1), value=-1)
        if uniform_C is not None:
            assert chunk.mean_row_D is not None  # a source along 1/V needs μ, and with μ there is w̄
            grad_CD.addr_(uniform_C, chunk.mean_row_D, alpha=-1)
        return grad_CD

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dh, dW, db) after the last chunk; no dW where it went to a given buffer."""
        vocab, total, scale = self._problem.vocab, self._problem.shard.total, self._problem.options.logit_scale
        for pending in self._sums:
            pending.wait()
        if self._weight_VD is not None:
            if not self._started:
                self._weight_VD.zero_()
            self._weight_VD = self._finished_weight(self._weight_VD)
        if self._bias_V is not None:
            if self._has_uniform:
                self._bias_V[:vocab].sub_(self._uniform / total)
            self._bias_V.mul_(scale)
        if self._hidden_TD is not None and scale != 1:
            self._hidden_TD.mul_(scale)
        return self._hidden_TD, None if self._given else self._weight_VD, self._bias_V

    def _finished_weight(self, weight_VD: Tensor) -> Tensor:
        """dW less its part along 1/V, in the unit of the gradient. Where a pass is needed anyway, a bf16 dW is rounded in it:
        it would be rounded next."""
        vocab, out_VD = self._problem.vocab, weight_VD
        uniform_D = self._uniform_D / self._problem.shard.total if self._has_uniform else None
        passes = uniform_D is not None or self._factors.scaled
        if passes and self._problem.weight_VD.dtype == torch.bfloat16 and not self._given:
            out_VD = torch.empty_like(weight_VD, dtype=torch.bfloat16)
        self._factors.leave(weight_VD[:vocab], uniform_D, out_VD[:vocab])
        if not self._given:
            out_VD[vocab:].zero_()
        return out_VD
