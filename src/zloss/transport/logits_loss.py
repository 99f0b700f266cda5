"""`logits_loss`: the same objectives for logits one already has.

The caller's logits are never overwritten: the chunked backend forms the gradient of a scalar loss in forward, in a tensor
of its own, and Triton forms it in backward. 16-bit logits are read in fp32; what their storage has lost cannot be
recovered (paper sec:precision_link).
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from zloss.distributed import is_dtensor
from zloss.source.objective import Objective
from zloss.source.reduction import Reduction
from zloss.transport.backends.choice import Backend, resolve_backend, runs_in_triton
from zloss.transport.backends.chunked_logits import chunked_logits_loss
from zloss.transport.backends.dense import dense_logits_loss
from zloss.transport.backends.loss_parts import LossParts
from zloss.transport.backends.product_plan import Products
from zloss.transport.head_loss import HeadLossOutput, output_of
from zloss.transport.logits_problem import LogitsProblem, prepare_logits
from zloss.transport.options import HeadOptions
from zloss.transport.outside_compile import outside_compile_unless
from zloss.transport.sharded_arguments import open_logits
from zloss.transport.statistics_plan import Statistics
from zloss.transport.tensor_arguments import check_tensors, compute_dtype


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
    products: Products = "auto",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> HeadLossOutput:
    """The loss of `head_loss` from `logits` [..., V]; `weight` [V, D] is needed only for the gain (and gain-aware Z-loss).

    `logit_scale` and `softcap` are applied to `logits` here: leave them alone if the model has already done so.
    Logits that are divided over ranks are a DTensor with Shard(-1), or this rank's columns with `group=`.

    >>> import torch, zloss
    >>> logits = torch.randn(3, 11, requires_grad=True)
    >>> zloss.logits_loss(logits, torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4)).loss.backward()
    """
    options = HeadOptions(
        objective=objective,
        ignore_index=ignore_index,
        reduction=reduction,
        valid_vocab=valid_vocab,
        logit_scale=logit_scale,
        softcap=softcap,
        label_smoothing=label_smoothing,
        statistics=statistics,
        backend=backend,
        products=products,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
    )
    return _logits_loss(logits, target, weight, options, normalizer, token_weight, group)


def _traceable(logits: Tensor, target: Tensor, weight: Tensor | None, options: HeadOptions, *rest: object) -> bool:
    """The Triton backend is made of ops; ranks compare their arguments."""
    if rest[-1] is not None or is_dtensor(logits):
        return False
    return runs_in_triton(options.backend, logits.device, compute_dtype(logits, weight))


@outside_compile_unless(_traceable)
def _logits_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
) -> HeadLossOutput:
    """`logits_loss` with checked options."""
    check_tensors(logits=logits, target=target, optional={"weight": weight, "token_weight": token_weight})
    logits, weight, group = open_logits(logits, weight, group)
    problem = prepare_logits(
        logits, target, weight, options, token_weight=token_weight, normalizer=normalizer, group=group
    )
    # The row ops of Triton form the gradient of whole rows; a rank's columns go through the chunks on any device.
    chosen = resolve_backend(options.backend, logits.device, problem.dtype) if group is None else "chunked"
    parts = _BACKENDS[chosen](problem)
    return output_of(parts, problem.targets)


def _triton(problem: LogitsProblem) -> LossParts:
    from zloss.transport.backends.triton.logits import triton_logits_loss

    return triton_logits_loss(problem)


_BACKENDS = {"dense": dense_logits_loss, "chunked": chunked_logits_loss, "triton": _triton}
