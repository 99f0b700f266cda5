"""`head_loss`: cross-entropy plus any Z-loss of the paper, from hidden states and the output head.

[zloss.head.loss] `logits_loss`: the same objectives for logits one already has.

The caller's logits are never overwritten: the chunked backend forms the gradient of a scalar loss in forward, in a tensor
of its own, and Triton forms it in backward. 16-bit logits are read in fp32; what their storage has lost cannot be
recovered (paper sec:precision_link).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from zloss.ranks.distributed_tensors import is_dtensor
from zloss.objectives import Objective
from zloss.head.arguments import DenominatorName, Reduction
from zloss.statistics import TokenStats
from zloss.head.options import Backend, resolve_backend, runs_in_triton
from zloss.head.chunked import chunked_head_loss
from zloss.head.reference import dense_head_loss
from zloss.head.chunked import LossParts
from zloss.head.products import Products
from zloss.head.rows import TorchRows
from zloss.head.arguments import HeadProblem
from zloss.head.arguments import open_problem
from zloss.head.options import HeadOptions
from zloss.head.compiling import outside_compile_unless
from zloss.statistics import Statistics
from zloss.head.arguments import Targets
from zloss.tensors import compute_dtype
from torch import Tensor
from zloss.head.arguments import Reduction
from zloss.head.chunked import chunked_logits_loss
from zloss.head.reference import dense_logits_loss
from zloss.head.arguments import LogitsProblem, prepare_logits
from zloss.head.sharded import open_logits
from zloss.tensors import check_tensors, compute_dtype


# <<< zloss.head.loss
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


def output_of(parts: LossParts, targets: Targets) -> HeadLossOutput:
    """The parts of a backend in the shape of `target`, with their denominator."""
    values, weights = (parts.loss, parts.cross_entropy, parts.auxiliary), targets.weights
    if weights.reduction == "none":
        loss, cross_entropy, auxiliary = (value.reshape(targets.shape) for value in values)
    else:
        loss, cross_entropy, auxiliary = values
    stats = parts.stats.reshape(targets.shape)
    return HeadLossOutput(loss, cross_entropy, auxiliary, stats, weights.denominator, weights.denominator_name)


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
    products: Products = "auto",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    weight_grad_buffer: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> HeadLossOutput:
    """Σ_t w_t (CE_t + aux_t) / N for z = logit_scale·(W u + b), without keeping the logits.

    `hidden` [..., D], `weight` [V, D], `target` [...]. "mean" divides by N = Σ w_t over valid tokens, or by an explicit
    global `normalizer`; "sum" does not divide; "none" returns w_t·ℓ_t in the shape of `target`. Rows of the head from
    `valid_vocab` on are padding: outside log Z, μ and w̄. `statistics="light"` skips what the loss itself does not need.
    `products` says in which dtype the matrix products run (`backends/product_plan.py`). dW is added to
    `weight_grad_buffer`, an fp32 [V, D] such as Megatron's `main_grad`, where one is given (`gradient_buffer.py`).
    A head that is divided over ranks by vocabulary rows is a DTensor with Shard(0), or this rank's rows with `group=`;
    everything that is returned is that of the whole vocabulary on every rank.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    >>> out = zloss.head_loss(hidden, weight, torch.tensor([1, 2, -100, 10]), zloss.CenteredZLoss(coef=1e-4))
    >>> out.loss.backward()
    >>> int(out.denominator), out.stats.gain.shape
    (3, torch.Size([4]))
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
    return _head_loss(hidden, weight, target, bias, options, normalizer, token_weight, weight_grad_buffer, group)


def _traceable(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    weight_grad_buffer: Tensor | None,
    group: ProcessGroup | None,
) -> bool:
    """Whether a compiler may trace the loss: the Triton backend is made of ops. Three cases cannot be traced: per-token losses,
    which compute the chunks again in backward, a buffer for dW, which is written in forward, and ranks, which compare their
    arguments."""
    if group is not None or is_dtensor(weight) or is_dtensor(hidden):
        return False
    in_triton = runs_in_triton(options.backend, hidden.device, compute_dtype(hidden, weight, bias))
    return options.reduction != "none" and weight_grad_buffer is None and in_triton


@outside_compile_unless(_traceable)
def _head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    weight_grad_buffer: Tensor | None,
    group: ProcessGroup | None,
) -> HeadLossOutput:
    """`head_loss` with checked options."""
    problem = open_problem(
        hidden,
        weight,
        target,
        bias,
        options,
        token_weight=token_weight,
        normalizer=normalizer,
        group=group,
        weight_grad_buffer=weight_grad_buffer,
    )
    parts = _BACKENDS[resolve_backend(options.backend, hidden.device, problem.dtype)](problem)
    if problem.poisoned_T is not None:
        row_max_T = parts.stats.row_max.masked_fill(problem.poisoned_T, torch.nan)
        parts = replace(parts, stats=replace(parts.stats, row_max=row_max_T))
    return output_of(parts, problem.targets)


def _chunked(problem: HeadProblem) -> LossParts:
    return chunked_head_loss(problem, TorchRows(problem.options.softcap, plan=problem.products))


def _triton(problem: HeadProblem) -> LossParts:
    from zloss.head.triton import triton_head_loss

    return triton_head_loss(problem)


_BACKENDS = {"dense": dense_head_loss, "chunked": _chunked, "triton": _triton}


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
        products: Products = "auto",
        chunk_size: int | None = None,
        memory_budget: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.options = HeadOptions(
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

    @property
    def objective(self) -> Objective:
        return self.options.objective

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        normalizer: float | Tensor | None = None,
        token_weight: Tensor | None = None,
        weight_grad_buffer: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> HeadLossOutput:
        """The loss of these tensors; the arguments are those of `head_loss`. `group` replaces the one of the module."""
        group = self.group if group is None else group
        return _head_loss(
            hidden, weight, target, bias, self.options, normalizer, token_weight, weight_grad_buffer, group
        )

    def extra_repr(self) -> str:
        named = (field.name for field in fields(self.options) if field.name != "objective")
        return ", ".join([str(self.objective), *(f"{name}={getattr(self.options, name)!r}" for name in named)])


# <<< zloss.head.loss
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
    from zloss.head.triton import triton_logits_loss

    return triton_logits_loss(problem)


_BACKENDS = {"dense": dense_logits_loss, "chunked": chunked_logits_loss, "triton": _triton}
