"""`logits_loss`: the same objectives for logits one already has.

The chunked backend forms the gradient in forward for scalar reductions, in a tensor of its own, and Triton in backward:
the caller's logits are never overwritten. 16-bit logits are read in fp32; what their storage has lost cannot be
recovered (paper sec:precision_link).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.source.statistics import TokenStats
from zloss.transport.backends.choice import Backend, resolve_backend, runs_in_triton
from zloss.transport.backends.chunked import STAT_FIELDS, present_fields, refuse_double_backward
from zloss.transport.backends.dense import dense_loss, dense_stats, transform_logits
from zloss.transport.backends.head_rows import HeadRows
from zloss.transport.backends.rows import Injection, chunk_bounds, chunk_stats, exp_rows_, inject, softcap_rows_
from zloss.transport.head_loss import HeadLossOutput
from zloss.transport.logits_problem import LogitsProblem, check_stats, prepare_logits
from zloss.transport.outside_compile import outside_compile_unless
from zloss.transport.problem import Options, Statistics, compute_dtype


@dataclass(frozen=True)
class _Chunk:
    tokens: slice
    index_C: Tensor
    exp_CV: Tensor
    slope_CV: Tensor | None
    sum_C: Tensor
    stats: TokenStats
    injection: Injection


def _traceable(logits: Tensor, *args: object, backend: Backend = "auto", **options: Any) -> bool:
    """The Triton backend is made of ops."""
    return runs_in_triton(backend, logits.device, compute_dtype(logits, options.get("weight")))


@outside_compile_unless(_traceable)
def logits_loss(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    weight: Tensor | None = None,
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
    """The loss of `head_loss` from `logits` [..., V]; `weight` [V, D] is needed only for the gain (and gain-aware Z-loss).

    `logit_scale` and `softcap` are applied to `logits` here: leave them alone if the model has already done so.

    >>> import torch, zloss
    >>> logits = torch.randn(3, 11, requires_grad=True)
    >>> zloss.logits_loss(logits, torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4)).loss.backward()
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
    problem = prepare_logits(logits, target, weight, options, token_weight, normalizer, valid_vocab)
    run = _BACKENDS[resolve_backend(backend, logits.device, problem.dtype)]
    with torch.autocast(logits.device.type, enabled=False):
        loss, cross_entropy, auxiliary, stats = run(problem)
    if reduction == "none":
        loss, cross_entropy, auxiliary = (part.reshape(target.shape) for part in (loss, cross_entropy, auxiliary))
    weights = problem.targets.weights
    return HeadLossOutput(
        loss, cross_entropy, auxiliary, stats.reshape(target.shape), weights.denominator, weights.denominator_name
    )


def _dense(problem: LogitsProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    options, targets = problem.options, problem.targets
    inside_TV = problem.logits_TV[:, : problem.vocab].to(problem.dtype)
    # Ignored rows may hold anything; zeros keep a NaN there from reaching a gradient through 0·NaN.
    inside_TV = torch.where(targets.valid_T.unsqueeze(1), inside_TV, inside_TV.new_zeros(()))
    logits_TV = transform_logits(inside_TV, options)
    head_VD = None if problem.weight_VD is None else problem.weight_VD.detach()[: problem.vocab].to(problem.dtype)
    whole_TV = transform_logits(problem.logits_TV.detach()[:, : problem.vocab].to(problem.dtype), options)
    stats = dense_stats(whole_TV, targets, options, head_VD, has_mu=options.softcap is None)
    check_stats(stats, options)
    return *dense_loss(logits_TV, targets, options, stats.gain), stats


def _iterate(problem: LogitsProblem) -> Iterator[_Chunk]:
    options, targets, vocab = problem.options, problem.targets, problem.vocab
    full = options.statistics != "light"
    rows = None
    if problem.weight_VD is not None and (full or (options.objective.active and options.objective.needs_gain)):
        rows = HeadRows(problem.weight_VD[:vocab], problem.dtype, None)
    mean_row_D = rows.mean() if rows is not None and full else None
    mu_wanted = options.softcap is None and (full or options.objective.needs_mu or options.label_smoothing != 0)
    buffers = 1 if options.softcap is None else 2
    bounds = chunk_bounds(problem.logits_TV.shape[0], vocab, problem.dtype.itemsize, options.chunk_size, buffers)
    longest = max((stop - start for start, stop in bounds), default=0)
    buffer = problem.logits_TV.new_empty((buffers, longest, vocab), dtype=problem.dtype)
    for start, stop in bounds:
        tokens = slice(start, stop)
        valid_C, index_C = targets.valid_T[tokens], targets.index_T[tokens]
        z_CV = buffer[0, : stop - start].copy_(problem.logits_TV.detach()[tokens, :vocab])
        if options.logit_scale != 1:
            z_CV.mul_(options.logit_scale)
        slope_CV = None
        if options.softcap is not None:
            slope_CV = buffer[1, : stop - start]
            softcap_rows_(z_CV, slope_CV, options.softcap)
        target_logit_C = z_CV.gather(1, index_C.unsqueeze(1)).squeeze(1)
        mu_C = z_CV.mean(dim=1) if mu_wanted else None
        sums = exp_rows_(z_CV, norm=full or rows is not None)
        stats = chunk_stats(
            sums,
            target_logit_C,
            valid_C,
            vocab,
            mu_C=mu_C,
            projected_CD=None if rows is None else rows.back_project(z_CV if slope_CV is None else z_CV * slope_CV),
            mean_row_D=mean_row_D if mu_C is not None else None,
            logit_scale=options.logit_scale,
        )
        check_stats(stats, options)
        yield _Chunk(tokens, index_C, z_CV, slope_CV, sums.sum_C, stats, inject(stats, options))


def _gradient_(chunk: _Chunk, upstream_C: Tensor, problem: LogitsProblem, out_CV: Tensor) -> None:
    """out = upstream·s·slope·(a p − b onehot − g/V), in the storage dtype; E is consumed."""
    injection, zero = chunk.injection, upstream_C.new_zeros(())
    valid_C = chunk.stats.valid
    p_C = torch.where(valid_C, upstream_C * injection.along_p / chunk.sum_C, zero)
    target_C = torch.where(valid_C, upstream_C * injection.along_target, zero)
    grad_CV = chunk.exp_CV.mul_(p_C.unsqueeze(1))
    grad_CV.scatter_add_(1, chunk.index_C.unsqueeze(1), -target_C.unsqueeze(1))
    if injection.has_uniform:
        uniform_C = torch.where(valid_C, upstream_C * injection.along_uniform, zero)
        grad_CV.sub_(uniform_C.unsqueeze(1) / problem.vocab)
    if chunk.slope_CV is not None:
        grad_CV.mul_(chunk.slope_CV)
    if problem.options.logit_scale != 1:
        grad_CV.mul_(problem.options.logit_scale)
    # Rows of ignored tokens may have held NaN or infinities: 0·NaN must not pass.
    grad_CV.masked_fill_(~valid_C.unsqueeze(1), 0)
    out_CV[:, : problem.vocab].copy_(grad_CV)


def _chunked(problem: LogitsProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    box: dict[str, Any] = {}
    loss: Tensor = _LogitsLoss.apply(problem.logits_TV, problem, box)  # type: ignore[no-untyped-call]
    weight_T, valid_T = problem.targets.weights.per_token, problem.targets.valid_T
    ce, aux = (torch.where(valid_T, weight_T * box[name], weight_T.new_zeros(())) for name in ("ce", "aux"))
    if problem.options.reduction != "none":
        ce, aux = ce.sum(), aux.sum()
    fields = present_fields(
        problem.options, has_mu=problem.options.softcap is None, has_weight=problem.weight_VD is not None
    )
    stats = box["stats"] or {name: weight_T.new_zeros(0) for name in fields if name != "mu_residual"}
    return loss, ce, aux, TokenStats(valid=valid_T, vocab=problem.vocab, **stats)


class _LogitsLoss(torch.autograd.Function):
    """Gradient in forward for a scalar; recomputed in backward from the logits for per-token upstream gradients."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, problem: LogitsProblem, box: dict[str, Any]) -> Tensor:
        tokens, like = logits_TV.shape[0], problem.targets.weights.per_token
        scalar = problem.options.reduction != "none"
        ce_T, aux_T = like.new_zeros(tokens), like.new_zeros(tokens)
        stats: dict[str, Tensor] = {}
        wanted = scalar and problem.grad_enabled and logits_TV.requires_grad
        grad_TV = torch.zeros_like(logits_TV) if wanted else None
        for chunk in _iterate(problem):
            ce_T[chunk.tokens], aux_T[chunk.tokens] = chunk.injection.cross_entropy, chunk.injection.auxiliary
            for name in STAT_FIELDS:
                value_C = getattr(chunk.stats, name)
                if value_C is not None:
                    stats.setdefault(name, like.new_zeros(tokens))[chunk.tokens] = value_C
            if grad_TV is not None:
                _gradient_(chunk, like[chunk.tokens], problem, grad_TV[chunk.tokens])
        box.update(ce=ce_T, aux=aux_T, stats=stats)
        # Handed out once, so that whoever gets it may change it; a second backward recomputes.
        ctx.ready = [grad_TV] if wanted else []
        ctx.save_for_backward(logits_TV)
        ctx.problem = replace(problem, logits_TV=logits_TV.new_empty(0))
        loss_T = torch.where(problem.targets.valid_T, like * (ce_T + aux_T), like.new_zeros(()))
        return loss_T.sum() if scalar else loss_T

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        refuse_double_backward()
        if ctx.ready:
            unit = upstream.device.type == "cpu" and float(upstream) == 1.0
            ready_TV = ctx.ready.pop()
            return ready_TV if unit else ready_TV.mul_(upstream), None, None
        (logits_TV,) = ctx.saved_tensors
        problem = replace(ctx.problem, logits_TV=logits_TV)
        per_token_T = problem.targets.weights.per_token * upstream
        grad_TV = torch.zeros_like(logits_TV)
        with torch.autocast(logits_TV.device.type, enabled=False):
            for chunk in _iterate(problem):
                _gradient_(chunk, per_token_T[chunk.tokens], problem, grad_TV[chunk.tokens])
        return grad_TV, None, None


def _triton(problem: LogitsProblem) -> tuple[Tensor, Tensor, Tensor, TokenStats]:
    from zloss.transport.backends.triton.logits import triton_logits_loss

    return triton_logits_loss(problem)


_BACKENDS = {"dense": _dense, "chunked": _chunked, "triton": _triton}
