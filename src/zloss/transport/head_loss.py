"""`head_loss`: cross-entropy plus any Z-loss of the paper, from hidden states and the output head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zloss.source.objective import Objective
from zloss.source.reduction import DenominatorName, Reduction
from zloss.source.statistics import TokenStats
from zloss.transport.backends.choice import Backend, resolve_backend, runs_in_triton
from zloss.transport.backends.chunked import chunked_loss
from zloss.transport.backends.dense import dense_logits, dense_loss, dense_stats, operand
from zloss.transport.backends.rows import TorchRows, check_rows
from zloss.transport.outside_compile import outside_compile_unless
from zloss.transport.problem import (
    HeadProblem,
    Options,
    Statistics,
    check_mu_need,
    check_options,
    compute_dtype,
    prepare_head,
)


@dataclass(frozen=True)
class HeadLossOutput:
    """What a loss returns: the differentiable sum, its two parts apart, and the statistics of every token."""

    loss: Tensor
    """CE + auxiliary, reduced; differentiable; fp32 (fp64 for fp64 inputs)."""
    cross_entropy: Tensor
    """The CE part, detached; loss = cross_entropy + auxiliary."""
    auxiliary: Tensor
    """The Z part, detached."""
    stats: TokenStats
    denominator: Tensor
    """N, by which both parts were divided (1 for "sum" and "none")."""
    denominator_name: DenominatorName
    """What N counts."""


def _traceable(hidden: Tensor, weight: Tensor, *args: object, backend: Backend = "auto", **options: Any) -> bool:
    """The Triton backend is made of ops; only per-token losses go through the chunks a second time in backward."""
    dtype = compute_dtype(hidden, weight, options.get("bias"))
    return options.get("reduction") != "none" and runs_in_triton(backend, hidden.device, dtype)


@outside_compile_unless(_traceable)
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    valid_vocab: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    statistics: Statistics = "full",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> HeadLossOutput:
    """Σ_t w_t (CE_t + aux_t) / N for z = logit_scale·(W u + b), without keeping the logits.

    `hidden` [..., D], `weight` [V, D], `target` [...]. "mean" divides by N = Σ w_t over valid tokens, or by an explicit
    global `normalizer`; "sum" does not divide; "none" returns w_t·ℓ_t in the shape of `target`. Rows of the head from
    `valid_vocab` on are padding: outside log Z, μ and w̄. `statistics="light"` skips what the loss itself does not need.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    >>> out = zloss.head_loss(hidden, weight, torch.tensor([1, 2, -100, 10]), zloss.CenteredZLoss(coef=1e-4))
    >>> out.loss.backward()
    >>> int(out.denominator), out.stats.gain.shape
    (3, torch.Size([4]))
    """
    options = Options(
        objective=objective,
        ignore_index=ignore_index,
        reduction=reduction,
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        statistics=statistics,
        chunk_size=chunk_size,
    )
    problem = prepare_head(
        hidden, weight, target, bias, options, token_weight=token_weight, normalizer=normalizer, valid_vocab=valid_vocab
    )
    run = _BACKENDS[resolve_backend(backend, hidden.device, problem.dtype)]
    loss, cross_entropy, auxiliary, stats = run(problem)
    if problem.poisoned_T is not None:
        stats = replace(stats, row_max=stats.row_max.masked_fill(problem.poisoned_T, torch.nan))
    if reduction == "none":
        loss, cross_entropy, auxiliary = (part.reshape(problem.shape) for part in (loss, cross_entropy, auxiliary))
    weights = problem.targets.weights
    return HeadLossOutput(
        loss, cross_entropy, auxiliary, stats.reshape(problem.shape), weights.denominator, weights.denominator_name
    )


def _dense(problem: HeadProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    with torch.autocast(problem.hidden_TD.device.type, enabled=False):
        logits_TV = dense_logits(problem)
        weight_VD = operand(problem.weight_VD.detach()[: problem.vocab], problem.dtype, problem.rounding)
        stats = dense_stats(logits_TV, problem.targets, problem.options, weight_VD, has_mu=problem.has_mu)
        check_rows(stats)
        return *dense_loss(logits_TV, problem.targets, problem.options, stats.gain), stats


def _chunked(problem: HeadProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    return chunked_loss(problem, TorchRows(problem.options.softcap))


def _triton(problem: HeadProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    from zloss.transport.backends.triton.head import triton_head_loss

    return triton_head_loss(problem)


_BACKENDS = {"dense": _dense, "chunked": _chunked, "triton": _triton}


class HeadLoss(nn.Module):
    """`head_loss` with its options fixed: the module form for training code.

    >>> import torch, zloss
    >>> loss_fn = zloss.HeadLoss(zloss.StandardZLoss(1e-4), ignore_index=0)
    >>> out = loss_fn(torch.randn(2, 3, 8), torch.randn(11, 8), torch.randint(11, (2, 3)))
    """

    def __init__(
        self,
        objective: Objective,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        valid_vocab: int | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        label_smoothing: float = 0.0,
        statistics: Statistics = "full",
        backend: Backend = "auto",
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        checked = Options(
            objective, ignore_index, reduction, logit_scale, softcap, label_smoothing, statistics, chunk_size
        )
        check_options(checked)
        check_mu_need(checked, has_mu=softcap is None)
        self.objective = objective
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "valid_vocab": valid_vocab,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "label_smoothing": label_smoothing,
            "statistics": statistics,
            "backend": backend,
            "chunk_size": chunk_size,
        }

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,
    ) -> HeadLossOutput:
        return head_loss(
            hidden,
            weight,
            target,
            self.objective,
            bias=bias,
            normalizer=normalizer,
            token_weight=token_weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        return f"{self.objective}, " + ", ".join(f"{name}={value!r}" for name, value in self.options.items())
