"""`head_source`: the logit source exactly as a backend applies it, for audits and tests."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from zloss.errors import UnknownNameError
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.transport.backend import Backend, resolve_backend
from zloss.transport.chunked import Chunk, iterate_chunks
from zloss.transport.dense import dense_logits, dense_loss, dense_stats, operand
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
        return _dense_source(problem, part) if chosen == "dense" else _chunked_source(problem, part)


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


@torch.no_grad()
def _chunked_source(problem: HeadProblem, part: Part) -> Tensor:
    out_TV = problem.hidden_TD.new_zeros((problem.hidden_TD.shape[0], problem.vocab), dtype=problem.dtype)
    for chunk in iterate_chunks(problem, back_projection=False):
        out_TV[chunk.tokens] = _chunk_source(chunk, problem.targets.weights.per_token[chunk.tokens], part)
    return out_TV


def _chunk_source(chunk: Chunk, weight_C: Tensor, part: Part) -> Tensor:
    injection, zero = chunk.injection, weight_C.new_zeros(())
    along_p = injection.along_p if part == "total" else injection.auxiliary_along_p
    uniform = injection.along_uniform if part == "total" else injection.auxiliary_along_uniform
    valid_C = chunk.stats.valid
    p_C = torch.where(valid_C, weight_C * along_p / chunk.sum_C, zero)
    source_CV = chunk.exp_CV * p_C.unsqueeze(1)
    if part == "total":
        target_C = torch.where(valid_C, weight_C * injection.along_target, zero)
        source_CV.scatter_add_(1, chunk.index_C.unsqueeze(1), -target_C.unsqueeze(1))
    if uniform is not None:
        uniform_C = torch.where(valid_C, weight_C * uniform, zero)
        source_CV.sub_(uniform_C.unsqueeze(1) / source_CV.shape[1])
    return source_CV
