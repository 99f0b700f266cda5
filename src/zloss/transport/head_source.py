"""`head_source`: the logit source exactly as a backend applies it, for audits and tests."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from zloss.errors import UnknownNameError
from zloss.source.injection import weighted_auxiliary_source, weighted_source
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.transport.backends.choice import Backend, Chosen, resolve_backend
from zloss.transport.backends.dense import dense_source
from zloss.transport.backends.head_chunks import iterate_head_chunks
from zloss.transport.backends.row_work import RowWork
from zloss.transport.backends.torch_rows import TorchRows
from zloss.transport.head_problem import HeadProblem, prepare_head
from zloss.transport.options import HeadOptions
from zloss.transport.outside_compile import outside_compile

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
    options = HeadOptions(
        objective=objective,
        ignore_index=ignore_index,
        reduction=reduction,
        valid_vocab=valid_vocab,
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        statistics="light",
        backend=backend,
        chunk_size=chunk_size,
    )
    problem = prepare_head(hidden, weight, target, bias, options, token_weight=token_weight, normalizer=normalizer)
    chosen = resolve_backend(backend, hidden.device, problem.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if chosen == "dense":
            return dense_source(problem, auxiliary_only=part == "z")
        return _chunked_source(problem, part, _row_work(chosen, softcap))


def _row_work(chosen: Chosen, softcap: float | None) -> RowWork:
    if chosen == "triton":
        from zloss.transport.backends.triton.rows import TritonRows

        return TritonRows(softcap, keep_logits=True)
    return TorchRows(softcap)


@torch.no_grad()
def _chunked_source(problem: HeadProblem, part: Part, work: RowWork) -> Tensor:
    out_TV = problem.hidden_TD.new_zeros((problem.hidden_TD.shape[0], problem.vocab), dtype=problem.dtype)
    weighted = weighted_source if part == "total" else weighted_auxiliary_source
    for chunk in iterate_head_chunks(problem, back_projection=False, work=work):
        valid_C, sum_C = chunk.stats.valid, chunk.rows.sums.sum_C
        source = weighted(chunk.injection, sum_C, valid_C, problem.targets.weights.per_token[chunk.tokens])
        out_TV[chunk.tokens] = work.source(chunk.rows, chunk.index_C, valid_C, source, through_softcap=False)
    return out_TV
