"""`head_source`: the logit source exactly as a backend applies it, for audits and tests."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.errors import UnknownNameError
from zloss.source.injection import weighted_auxiliary_source, weighted_source
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.transport.backends.choice import Backend, Chosen, resolve_backend
from zloss.transport.backends.chunks import own_source
from zloss.transport.backends.dense import dense_source
from zloss.transport.backends.head_chunks import iterate_head_chunks
from zloss.transport.backends.product_plan import ProductPlan, Products
from zloss.transport.backends.row_work import RowWork
from zloss.transport.backends.torch_rows import TorchRows
from zloss.transport.head_problem import HeadProblem
from zloss.transport.open_problem import open_problem
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
    products: Products = "auto",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """∂loss/∂z as [T, V], fp32 (fp64 for fp64): the auxiliary part alone ("z") or cross-entropy plus auxiliary ("total").

    The source stands at the final logits: after logit scale and softcap, before any transport. Scaling: the reduction
    weight (1/N for "mean") is inside; V is `valid_vocab` where given. Of a head that is divided over ranks this rank's
    columns come back.

    >>> import torch, zloss
    >>> hidden, weight, target = torch.randn(4, 8), torch.randn(11, 8), torch.tensor([1, 2, -100, 10])
    >>> source = zloss.head_source(hidden, weight, target, zloss.CenteredZLoss(1e-4), part="z")
    >>> source.shape, bool(source[2].any())
    (torch.Size([4, 11]), False)
    """
    if not isinstance(part, str) or part not in get_args(Part):
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
        products=products,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
    )
    problem = open_problem(
        hidden,
        weight,
        target,
        bias,
        options,
        token_weight=token_weight,
        normalizer=normalizer,
        group=group,
        whole_tokens=True,
    )
    chosen = resolve_backend(backend, hidden.device, problem.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        if chosen == "dense":
            return dense_source(problem, auxiliary_only=part == "z")
        return _chunked_source(problem, part, _row_work(chosen, softcap, problem.products))


def _row_work(chosen: Chosen, softcap: float | None, plan: ProductPlan) -> RowWork:
    if chosen == "triton":
        from zloss.transport.backends.triton.rows import TritonRows

        return TritonRows(softcap, plan=plan, keep_logits=True)
    return TorchRows(softcap, plan=plan)


@torch.no_grad()
def _chunked_source(problem: HeadProblem, part: Part, work: RowWork) -> Tensor:
    out_TV = problem.hidden_TD.new_zeros((problem.hidden_TD.shape[0], problem.vocab), dtype=problem.dtype)
    weighted = weighted_source if part == "total" else weighted_auxiliary_source
    for chunk in iterate_head_chunks(problem, back_projection=False, work=work):
        valid_C, sum_C = chunk.stats.valid, chunk.joined.sums.sum_C
        source = weighted(chunk.injection, sum_C, valid_C, problem.targets.weights.per_token[chunk.tokens])
        out_TV[chunk.tokens] = own_source(work, problem.shard, chunk, valid_C, source, through_softcap=False)
    return out_TV
