"""The truth: whole logits, the definitions of the objectives, and autograd. Any dtype, fp64 included.

Costs [T, V] memory several times over; every other backend is tested against this one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.source.statistics import TokenStats
from zloss.transport.problem import HeadProblem, Options, Targets


class _Round(torch.autograd.Function):
    """Round to the autocast dtype in the forward pass only: the gradient of the master weight stays in full precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype, high: torch.dtype) -> Tensor:
        return x.to(low).to(high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def operand(x: Tensor, dtype: torch.dtype, rounding: torch.dtype | None) -> Tensor:
    """A factor of the projection as F.linear would see it, in compute precision."""
    if rounding is None or x.dtype == rounding:
        return x.to(dtype)
    rounded: Tensor = _Round.apply(x, rounding, dtype)  # type: ignore[no-untyped-call]
    return rounded


def dense_logits(problem: HeadProblem) -> Tensor:
    """z = s(Wu + b), softcapped: [T, V] with gradient."""
    bias = None if problem.bias_V is None else operand(problem.bias_V[: problem.vocab], problem.dtype, problem.rounding)
    hidden = operand(problem.hidden_TD, problem.dtype, problem.rounding)
    weight = operand(problem.weight_VD[: problem.vocab], problem.dtype, problem.rounding)
    return transform_logits(F.linear(hidden, weight, bias), problem.options)


def transform_logits(logits_TV: Tensor, options: Options) -> Tensor:
    """Logit scale, then softcap."""
    scaled = logits_TV * options.logit_scale if options.logit_scale != 1 else logits_TV
    if options.softcap is None:
        return scaled
    # A masked logit stays masked: tanh would turn -inf into the finite −cap.
    return torch.where(torch.isneginf(scaled), scaled, options.softcap * torch.tanh(scaled / options.softcap))


def dense_loss(
    logits_TV: Tensor, targets: Targets, options: Options, gain_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, cross-entropy, auxiliary) as defined, reduced; only the first carries gradient."""
    ce_T = F.cross_entropy(logits_TV, targets.index_T, reduction="none", label_smoothing=options.label_smoothing)
    active = options.objective.active
    aux_T = options.objective.penalty(logits_TV, gain_T) if active else torch.zeros_like(ce_T)
    weight_T = targets.weights.per_token
    zero = ce_T.new_zeros(())
    ce_T = torch.where(targets.valid_T, weight_T * ce_T, zero)
    aux_T = torch.where(targets.valid_T, weight_T * aux_T, zero)
    if options.reduction == "none":
        return ce_T + aux_T, ce_T.detach(), aux_T.detach()
    return ce_T.sum() + aux_T.sum(), ce_T.sum().detach(), aux_T.sum().detach()


@torch.no_grad()
def dense_stats(
    logits_TV: Tensor, targets: Targets, options: Options, weight_VD: Tensor | None, *, has_mu: bool
) -> TokenStats:
    """Every statistic from its definition; `weight_VD` in compute precision, or None where no head is known."""
    row_max = logits_TV.amax(dim=1)
    log_s = torch.logsumexp(logits_TV - row_max.unsqueeze(1), dim=1)
    picked = logits_TV.gather(1, targets.index_T.unsqueeze(1)).squeeze(1)
    basic = TokenStats(
        row_max=row_max,
        log_s=log_s,
        target_logit=torch.where(targets.valid_T, picked, picked.new_zeros(())),
        valid=targets.valid_T,
        vocab=logits_TV.shape[1],
    )
    if options.statistics == "light" and not options.objective.needs_gain:
        return basic
    p_TV = torch.softmax(logits_TV, dim=1)
    p_norm = p_TV.norm(dim=1)
    gain = gain_centered = None
    if weight_VD is not None:
        slope = 1 if options.softcap is None else (1 - (logits_TV / options.softcap) ** 2).clamp_min(0)
        scaled_VD = options.logit_scale * weight_VD
        gain = ((p_TV * slope) @ scaled_VD).norm(dim=1) / p_norm
        if has_mu:
            gain_centered = (p_TV @ scaled_VD - scaled_VD.mean(dim=0)).norm(dim=1) / p_norm
    return TokenStats(
        row_max=basic.row_max,
        log_s=basic.log_s,
        target_logit=basic.target_logit,
        valid=basic.valid,
        vocab=basic.vocab,
        mu=logits_TV.mean(dim=1) if has_mu else None,
        p_norm=p_norm,
        gain=gain,
        gain_centered=gain_centered,
    )
