"""Row-wise work on one chunk of logits: statistics in place, and the coefficients of what is injected.

Axes: C tokens of a chunk, V vocabulary, D width. The buffer z_CV is overwritten by E = exp(z − m), which serves the
statistics, Wᵀp = EᵀW/S and dW alike; no second V-wide buffer exists unless the logits are softcapped.

`RowWork` is what a kernel must do for a backend; `TorchRows` does it in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zloss.errors import CoordinateError
from zloss.source.objective import Source
from zloss.source.statistics import TokenStats
from zloss.transport.backends.native.rows import fused_exp_rows_
from zloss.transport.problem import Options, may_read


@dataclass(frozen=True)
class RowSums:
    """Of one chunk: m, S = Σ exp(z − m), and √Σ exp(z − m)² (so ‖p‖₂ = norm / S)."""

    row_max_C: Tensor
    sum_C: Tensor
    norm_C: Tensor | None


def exp_rows_(z_CV: Tensor, *, norm: bool) -> RowSums:
    """Overwrite z with E = exp(z − m) and return the row sums: the one pair (m, S) that forward and backward share."""
    if (fused := fused_exp_rows_(z_CV)) is not None:
        return RowSums(*fused)
    row_max = z_CV.amax(dim=1)
    z_CV.sub_(row_max.unsqueeze(1)).exp_()
    return RowSums(row_max, z_CV.sum(dim=1), torch.linalg.vector_norm(z_CV, dim=1) if norm else None)


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


class RowWork(Protocol):
    """The V-wide work of a backend on one chunk of final logits, between its matrix products."""

    buffers: int
    """V-wide buffers per chunk; the first holds the logits."""

    def statistics(self, buffers_BCV: Tensor, index_C: Tensor, *, norm: bool, mean: bool) -> RowPass:
        """Softcap, statistics and E; the buffers are consumed."""
        ...

    def source(self, rows: RowPass, index_C: Tensor, p_C: Tensor, target_C: Tensor, uniform_C: Tensor) -> Tensor:
        """p·E − target·onehot(y) − uniform/V as [C, V]."""
        ...


class TorchRows:
    """Row work in plain PyTorch, in place."""

    def __init__(self, softcap: float | None) -> None:
        self._softcap = softcap
        self.buffers = 1 if softcap is None else 2

    def statistics(self, buffers_BCV: Tensor, index_C: Tensor, *, norm: bool, mean: bool) -> RowPass:
        z_CV = buffers_BCV[0]
        if self._softcap is not None:
            softcap_rows_(z_CV, buffers_BCV[1], self._softcap)
        target_logit_C = z_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        mean_logit_C = z_CV.mean(dim=1) if mean else None
        sums = exp_rows_(z_CV, norm=norm)
        shaped_CV = z_CV if self._softcap is None else buffers_BCV[1].mul_(z_CV)
        return RowPass(sums, target_logit_C, mean_logit_C, shaped_CV, z_CV)

    def source(self, rows: RowPass, index_C: Tensor, p_C: Tensor, target_C: Tensor, uniform_C: Tensor) -> Tensor:
        source_CV = rows.source_CV * p_C.unsqueeze(1)
        source_CV.scatter_add_(1, index_C.unsqueeze(1), -target_C.unsqueeze(1))
        return source_CV.sub_(uniform_C.unsqueeze(1) / source_CV.shape[1])


def chunk_stats(
    sums: RowSums,
    target_logit_C: Tensor,
    valid_C: Tensor,
    vocab: int,
    *,
    mu_C: Tensor | None,
    projected_CD: Tensor | None,
    mean_row_D: Tensor | None,
    logit_scale: float,
) -> TokenStats:
    """Statistics from the row sums and E W; the centered gain where the mean row w̄ is given.

    ‖Wᵀp‖/‖p‖ = ‖E W‖/‖E‖: S cancels. With a logit scale s the head is s·W.
    """
    gain_C = gain_centered_C = None
    if projected_CD is not None and sums.norm_C is not None:
        gain_C = abs(logit_scale) * projected_CD.norm(dim=1) / sums.norm_C
        if mean_row_D is not None:
            centered_CD = torch.addcmul(projected_CD, sums.sum_C.unsqueeze(1), mean_row_D, value=-1)
            gain_centered_C = abs(logit_scale) * centered_CD.norm(dim=1) / sums.norm_C
    return TokenStats(
        row_max=sums.row_max_C,
        log_s=sums.sum_C.log(),
        target_logit=torch.where(valid_C, target_logit_C, target_logit_C.new_zeros(())),
        valid=valid_C,
        vocab=vocab,
        mu=mu_C,
        p_norm=None if sums.norm_C is None else sums.norm_C / sums.sum_C,
        gain=gain_C,
        gain_centered=gain_centered_C,
    )


def softcap_rows_(z_CV: Tensor, slope_CV: Tensor, cap: float) -> None:
    """Overwrite z with cap·tanh(z/cap) and slope with the derivative 1 − tanh²(z/cap).

    A masked logit stays masked: tanh would turn -inf into the finite −cap and let it back into log Z.
    """
    masked_CV = torch.isneginf(z_CV)
    z_CV.div_(cap).tanh_()
    torch.mul(z_CV, z_CV, out=slope_CV)
    slope_CV.neg_().add_(1)
    z_CV.mul_(cap)
    z_CV.masked_fill_(masked_CV, -torch.inf)


@dataclass(frozen=True)
class Injection:
    """δ_t = along_p·p − along_target·onehot(y) − along_uniform/V of cross-entropy plus auxiliary, before reduction."""

    cross_entropy: Tensor
    auxiliary: Tensor
    along_p: Tensor
    along_target: float
    along_uniform: Tensor | float
    auxiliary_along_p: Tensor
    auxiliary_along_uniform: Tensor | None

    @property
    def has_uniform(self) -> bool:
        return isinstance(self.along_uniform, Tensor) or self.along_uniform != 0


def inject(stats: TokenStats, options: Options) -> Injection:
    """Values and coefficients of every token: label-smoothed cross-entropy (b = 1 − ε, g += ε) plus the auxiliary."""
    epsilon = options.label_smoothing
    ce = -stats.target_log_prob
    if epsilon:
        if stats.mu is None:
            raise CoordinateError("`label_smoothing` needs the mean logit μ, which does not exist for these logits.")
        # log Z − (1 − ε)z_y − εμ, written in differences from m so that a common shift cancels first.
        ce = stats.log_s - (1 - epsilon) * (stats.target_logit - stats.row_max) - epsilon * (stats.mu - stats.row_max)
    if options.objective.active:
        source = options.objective.source(stats)
    else:
        zero = torch.zeros_like(ce)
        source = Source(value=zero, along_p=zero)
    uniform = epsilon if source.along_uniform is None else source.along_uniform + epsilon
    return Injection(
        cross_entropy=ce,
        auxiliary=source.value,
        along_p=1 + source.along_p,
        along_target=1 - epsilon,
        along_uniform=uniform,
        auxiliary_along_p=source.along_p,
        auxiliary_along_uniform=source.along_uniform,
    )


def check_rows(stats: TokenStats) -> None:
    """A counted token whose every logit is -inf has no distribution. Reads values, so on the CPU only."""
    if not may_read(stats.row_max):
        return
    # A row of NaN has no maximum either, but it is a diverged model, whose loss is NaN, and not a masking mistake.
    empty = torch.isneginf(stats.row_max) & stats.valid & ~torch.isnan(stats.target_logit)
    if bool(empty.any()):
        first = int(empty.nonzero()[0, 0])
        raise CoordinateError(
            f"token {first} (of {int(empty.sum())} such) has only -inf logits, so it has no distribution: "
            "set its target to `ignore_index`, or unmask at least one vocabulary entry."
        )


def chunk_bounds(
    tokens: int, vocab: int, itemsize: int, chunk_size: int | None, buffers: int = 1
) -> list[tuple[int, int]]:
    """Token ranges of nearly equal length whose V-wide buffers stay near 128 MB.

    Large chunks amortise the pass over dW, small ones keep memory flat; 512 tokens at V = 50k was the best of
    64..1024 on the CPUs measured (benchmarks/bench_head_loss.py prints the sweep).
    """
    if tokens == 0:
        return []
    size = chunk_size or min(1024, max(32, 2**27 // (vocab * itemsize * buffers)))
    count = -(-tokens // size)
    step = -(-tokens // count)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]
