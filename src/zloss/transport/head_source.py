"""`head_source`: the logit source exactly as a backend applies it, for audits and tests."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from zloss.errors import UnknownNameError
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.transport.backends.choice import Backend, Chosen, resolve_backend
from zloss.transport.backends.chunked import Chunk, iterate_chunks
from zloss.transport.backends.dense import dense_logits, dense_loss, dense_stats, operand
from zloss.transport.backends.rows import RowWork, TorchRows
from zloss.transport.outside_compile import outside_compile
from zloss.transport.problem import HeadProblem, Options, prepare_head

Part = Literal["z", "total"]


@outside_compile
def head_source(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    part: Part = "z",
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    valid_vocab: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor:
    """∂loss/∂z as [T, V], fp32 (fp64 for fp64): the auxiliary part alone ("z") or cross-entropy plus auxiliary ("total").

    The source stands at the final logits: after logit scale and softcap, before any transport. Scaling: the reduction
    weight (1/N for "mean") is inside; V is `valid_vocab` where given.
    """
    if part not in get_args(Part):
        raise UnknownNameError("part", part, get_args(Part))
    options = Options(
        objective=objective,
        ignore_index=ignore_index,
        reduction=reduction,
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        statistics="light",
        chunk_size=chunk_size,
    )
    problem = prepare_head(
        hidden, weight, target, bias, options, token_weight=token_weight, normalizer=normalizer, valid_vocab=valid_vocab
    )
    chosen = resolve_backend(backend, hidden.device, problem.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if chosen == "dense":
            return _dense_source(problem, part)
        return _chunked_source(problem, part, _row_work(chosen, softcap))


def _dense_source(problem: HeadProblem, part: Part) -> Tensor:
    with torch.no_grad():
        logits_TV = dense_logits(problem)
        weight_VD = operand(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
        stats = dense_stats(logits_TV, problem.targets, problem.options, weight_VD, has_mu=problem.has_mu)
    with torch.enable_grad():
        leaf_TV = logits_TV.requires_grad_()
        if part == "total":
            loss_T = dense_loss(leaf_TV, problem.targets, problem.options, stats.gain)[0]
        elif problem.options.objective.active:
            penalty_T = problem.options.objective.penalty(leaf_TV, stats.gain)
            loss_T = torch.where(
                problem.targets.valid_T, problem.targets.weights.per_token * penalty_T, penalty_T.new_zeros(())
            )
        else:
            return torch.zeros_like(logits_TV).detach()
        (source_TV,) = torch.autograd.grad(loss_T.sum(), leaf_TV)
    return source_TV


def _row_work(chosen: Chosen, softcap: float | None) -> RowWork:
    if chosen == "triton":
        from zloss.transport.backends.triton.rows import TritonRows

        return TritonRows(softcap, keep_logits=True)
    return TorchRows(softcap)


@torch.no_grad()
def _chunked_source(problem: HeadProblem, part: Part, work: RowWork) -> Tensor:
    out_TV = problem.hidden_TD.new_zeros((problem.hidden_TD.shape[0], problem.vocab), dtype=problem.dtype)
    for chunk in iterate_chunks(problem, back_projection=False, work=work):
        coefficients = _coefficients(chunk, problem.targets.weights.per_token[chunk.tokens], part)
        out_TV[chunk.tokens] = work.source(chunk.rows, chunk.index_C, *coefficients)
    return out_TV


def _coefficients(chunk: Chunk, weight_C: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """w·a/S, w·b and w·g of a chunk, zero at ignored tokens; the auxiliary alone has no target."""
    injection, zero = chunk.injection, weight_C.new_zeros(())
    total = part == "total"
    along_p = injection.along_p if total else injection.auxiliary_along_p
    uniform = injection.along_uniform if total else injection.auxiliary_along_uniform
    target = injection.along_target if total else 0.0
    p_C, target_C, uniform_C = (
        torch.where(chunk.stats.valid, weight_C * along, zero)
        for along in (along_p / chunk.rows.sums.sum_C, target, 0.0 if uniform is None else uniform)
    )
    return p_C, target_C, uniform_C
