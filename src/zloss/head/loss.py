"""`head_loss` and `logits_loss`: cross-entropy plus any Z-loss of the paper, from hidden states and the output head, or
from logits you already have.

A call goes through four steps: the options check themselves (`options.py`), the tensors become a validated problem
(`arguments.py`), a backend computes the loss and its gradients (`chunked.py` on the CPU, `triton.py` on a GPU,
`reference.py` for the definition), and the parts are returned in the shape of `target`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zloss.distributed import is_dtensor
from zloss.head.arguments import (
    DenominatorName,
    HeadProblem,
    LogitsProblem,
    LossParts,
    Targets,
    check_rows,
    prepare_head,
    prepare_logits,
    refuse_smoothed_softcap,
)
from zloss.head.chunked import chunked_head_loss, chunked_logits_loss
from zloss.head.compiling import outside_compile_unless
from zloss.head.options import HeadKeywords, HeadOptions, resolve_backend, runs_in_triton, shows_options
from zloss.head.reference import dense_head_loss, dense_logits_loss
from zloss.objectives import Objective
from zloss.statistics import TokenStats
from zloss.tensors import compute_dtype


@dataclass(frozen=True)
class HeadLossOutput:
    """What a loss returns: the differentiable sum, its two parts separately, and the statistics of every token."""

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


@shows_options(HeadKeywords)
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    bias: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    weight_grad_buffer: Tensor | None = None,
    group: ProcessGroup | None = None,
    **options: Unpack[HeadKeywords],
) -> HeadLossOutput:
    """Σ_t w_t (CE_t + aux_t) / N for z = logit_scale·(W u + b), without keeping the logits.

    `hidden` [..., D], `weight` [V, D], `target` [...]. w is `token_weight`, 1 without it; N is Σ w over valid tokens, or
    the global `normalizer` (`zloss.global_normalizer`). `options` are the fields of `HeadOptions` (`head/options.py`), among
    them `reduction` ("mean", "sum", or "none" for w_t·ℓ_t in the shape of `target`), `valid_vocab` (rows of the head from
    there on are padding: outside log Z, μ and w̄), `statistics` ("light" skips what the loss itself does not need) and
    `products` (in which dtype the matrix products run).

    If `weight_grad_buffer` (fp32 [V, D], e.g. Megatron's `main_grad`) is given, dW is accumulated into it. For a
    vocabulary-parallel head pass a DTensor with Shard(0), or the local rows and `group=`; every rank returns
    full-vocabulary results.

    >>> import torch, zloss
    >>> hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    >>> out = zloss.head_loss(hidden, weight, torch.tensor([1, 2, -100, 10]), zloss.CenteredZLoss(coef=1e-4))
    >>> out.loss.backward()
    >>> int(out.denominator), out.stats.gain.shape
    (3, torch.Size([4]))
    """
    checked = HeadOptions(objective, **options)
    return _head_loss(hidden, weight, target, bias, checked, normalizer, token_weight, weight_grad_buffer, group)


class HeadLoss(nn.Module):
    """`head_loss` with its options fixed: the module form for training code.

    >>> import torch, zloss
    >>> loss_fn = zloss.HeadLoss(zloss.StandardZLoss(1e-4), ignore_index=0)
    >>> out = loss_fn(torch.randn(2, 3, 8), torch.randn(11, 8), torch.randint(11, (2, 3)))
    """

    @shows_options(HeadKeywords)
    def __init__(
        self, objective: Objective, *, group: ProcessGroup | None = None, **options: Unpack[HeadKeywords]
    ) -> None:
        super().__init__()
        self.group = group
        self.options = HeadOptions(objective, **options)

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
        """The loss of these tensors; the arguments are the same as for `head_loss`. `group` overrides the module's `group`."""
        group = self.group if group is None else group
        return _head_loss(
            hidden, weight, target, bias, self.options, normalizer, token_weight, weight_grad_buffer, group
        )

    def extra_repr(self) -> str:
        named = (field.name for field in fields(self.options) if field.name != "objective")
        return ", ".join([str(self.objective), *(f"{name}={getattr(self.options, name)!r}" for name in named)])


@shows_options(HeadKeywords)
def logits_loss(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    token_weight: Tensor | None = None,
    group: ProcessGroup | None = None,
    **options: Unpack[HeadKeywords],
) -> HeadLossOutput:
    """The loss of `head_loss` from `logits` [..., V]; `weight` [V, D] is needed only for the gain (and gain-aware Z-loss).

    `logit_scale` and `softcap` are applied to `logits` here: let them keep their defaults if the model has already done so. For
    vocabulary-parallel logits pass a DTensor with Shard(-1), or the local columns and `group=`. The caller's logits are
    never overwritten. 16-bit logits are read in fp32; what their storage has lost cannot be recovered (paper
    sec:precision_link).

    >>> import torch, zloss
    >>> logits = torch.randn(3, 11, requires_grad=True)
    >>> zloss.logits_loss(logits, torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4)).loss.backward()
    """
    return _logits_loss(logits, target, weight, HeadOptions(objective, **options), normalizer, token_weight, group)


def _head_is_traceable(
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
    """Whether a compiler may trace the loss: the Triton backend is built from custom ops. Three cases cannot be traced: per-token
    losses, which compute the chunks again in backward, a buffer for dW, which is written in forward, and ranks, which
    compare their arguments."""
    if group is not None or is_dtensor(weight) or is_dtensor(hidden):
        return False
    in_triton = runs_in_triton(options.backend, hidden.device, compute_dtype(hidden, weight, bias))
    return options.reduction != "none" and weight_grad_buffer is None and in_triton


@outside_compile_unless(_head_is_traceable)
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
    problem = prepare_head(
        hidden,
        weight,
        target,
        bias,
        options,
        token_weight=token_weight,
        normalizer=normalizer,
        weight_grad_buffer=weight_grad_buffer,
        group=group,
    )
    backend = resolve_backend(options.backend, hidden.device, problem.dtype)
    if backend != "dense":
        refuse_smoothed_softcap(options)
    loss, cross_entropy, auxiliary, stats = _HEAD_BACKENDS[backend](problem)
    if problem.nonfinite_mask_T is not None:
        stats = replace(stats, row_max=stats.row_max.masked_fill(problem.nonfinite_mask_T, torch.nan))
    return _output(problem.targets, loss, cross_entropy, auxiliary, stats)


def _logits_are_traceable(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
) -> bool:
    if group is not None or is_dtensor(logits):
        return False
    return runs_in_triton(options.backend, logits.device, compute_dtype(logits, weight))


@outside_compile_unless(_logits_are_traceable)
def _logits_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    normalizer: float | Tensor | None,
    token_weight: Tensor | None,
    group: ProcessGroup | None,
) -> HeadLossOutput:
    problem = prepare_logits(
        logits, target, weight, options, token_weight=token_weight, normalizer=normalizer, group=group
    )
    # The row ops of Triton form the gradient of whole rows; a rank's columns go through the chunks on any device.
    whole = problem.shard.whole
    backend = resolve_backend(options.backend, logits.device, problem.dtype) if whole else "chunked"
    return _output(problem.targets, *_LOGITS_BACKENDS[backend](problem))


def _output(
    targets: Targets, loss: Tensor, cross_entropy: Tensor, auxiliary: Tensor, stats: TokenStats
) -> HeadLossOutput:
    """The parts of a backend in the shape of `target`, with their denominator."""
    check_rows(stats)
    if targets.reduction == "none":
        loss, cross_entropy, auxiliary = (part.reshape(targets.shape) for part in (loss, cross_entropy, auxiliary))
    return HeadLossOutput(
        loss, cross_entropy, auxiliary, stats.reshape(targets.shape), targets.denominator, targets.denominator_name
    )


def _triton_head_loss(problem: HeadProblem) -> LossParts:
    from zloss.head.triton import triton_head_loss

    return triton_head_loss(problem)


def _triton_logits_loss(problem: LogitsProblem) -> LossParts:
    from zloss.head.triton import triton_logits_loss

    return triton_logits_loss(problem)


_HEAD_BACKENDS = {"dense": dense_head_loss, "chunked": chunked_head_loss, "triton": _triton_head_loss}
_LOGITS_BACKENDS = {"dense": dense_logits_loss, "chunked": chunked_logits_loss, "triton": _triton_logits_loss}
