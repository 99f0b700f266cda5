"""The reference: whole logits, the definitions of the objectives, and autograd. Any dtype, fp64 included.

Costs [T, V] memory several times over; every other backend is tested against this one.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.head.arguments import HeadProblem, LogitsProblem, LossParts, Targets, check_mean, check_rows
from zloss.head.options import HeadOptions
from zloss.head.rows import softcap_slope, softcapped
from zloss.statistics import StatisticsPlan, TokenStats
from zloss.tensors import without_autocast


def dense_loss(problem: HeadProblem | LogitsProblem) -> LossParts:
    """The loss from whole logits, with gradient to hidden, weight and bias, or to the logits."""
    options, targets = problem.options, problem.targets
    with without_autocast(problem.products.device_type):
        if isinstance(problem, HeadProblem):
            logits_TV, stats = dense_head_logits(problem)
            return _dense_loss(_without_ignored(logits_TV, targets), targets, options, stats)
        inside_TV = problem.logits_TV[:, : problem.local_rows].to(problem.dtype)
        with torch.no_grad():
            whole_TV = _final_logits(inside_TV, options)
            head_VD = None if problem.weight_VD is None else problem.weight_VD[: problem.local_rows].to(problem.dtype)
            stats = _dense_stats(whole_TV, targets, options, problem.plan, head_VD)
            check_mean(whole_TV.mean(dim=1) if options.uses_mean else None, targets.valid_T, options)
        inside_TV = _without_ignored(inside_TV, targets)
        return _dense_loss(_final_logits(inside_TV, options), targets, options, stats)


def _without_ignored(logits_TV: Tensor, targets: Targets) -> Tensor:
    """Zeros for the rows of ignored tokens: a NaN there would reach the gradient as 0·NaN."""
    return torch.where(targets.valid_T.unsqueeze(1), logits_TV, 0)


def dense_source(problem: HeadProblem, *, auxiliary_only: bool) -> Tensor:
    """∂loss/∂z at the final logits, [T, V]: of the auxiliary alone, or of cross-entropy plus auxiliary."""
    targets, options = problem.targets, problem.options
    with torch.no_grad():
        logits_TV, stats = dense_head_logits(problem)
    if auxiliary_only and not options.objective.active:
        return torch.zeros_like(logits_TV)
    with torch.enable_grad():
        leaf_TV = logits_TV.requires_grad_()
        if auxiliary_only:
            loss = targets.weighted(options.objective.penalty(leaf_TV, stats.gain)).sum()
        else:
            loss = _dense_loss(leaf_TV, targets, options, stats)[0].sum()
        (source_TV,) = torch.autograd.grad(loss, leaf_TV)
    return source_TV


def _dense_loss(logits_TV: Tensor, targets: Targets, options: HeadOptions, stats: TokenStats) -> LossParts:
    """Cross-entropy and penalty as defined; only the loss carries gradient."""
    ce_T = F.cross_entropy(logits_TV, targets.index_T, reduction="none", label_smoothing=options.label_smoothing)
    active = options.objective.active
    aux_T = options.objective.penalty(logits_TV, stats.gain) if active else torch.zeros_like(ce_T)
    check_rows(stats)
    ce, aux = targets.reduced(ce_T), targets.reduced(aux_T)
    return ce + aux, ce.detach(), aux.detach(), stats


def dense_head_logits(problem: HeadProblem) -> tuple[Tensor, TokenStats]:
    """z = s(Wu + b), softcapped, [T, V] with gradient; and its statistics."""
    hidden_TD = _operand(problem.hidden_TD, problem)
    weight_VD = _operand(problem.weight_VD[: problem.local_rows], problem)
    bias_V = None if problem.bias_V is None else _operand(problem.bias_V[: problem.local_rows], problem)
    logits_TV = _final_logits(F.linear(hidden_TD, weight_VD, bias_V), problem.options)
    with torch.no_grad():
        shift_T = None
        if problem.plan.mu_residual:
            mean_bias = 0.0 if bias_V is None else bias_V.mean()
            shift_T = problem.options.logit_scale * (hidden_TD @ weight_VD.mean(dim=0) + mean_bias)
        stats = _dense_stats(logits_TV, problem.targets, problem.options, problem.plan, weight_VD, shift_T)
    return logits_TV, stats


def _operand(x: Tensor, problem: HeadProblem) -> Tensor:
    """A factor of the projection as F.linear would see it, in compute precision."""
    if problem.rounding is None or x.dtype == problem.rounding:
        return x.to(problem.dtype)
    rounded: Tensor = _Round.apply(x, problem.rounding, problem.dtype)  # type: ignore[no-untyped-call]
    return rounded


class _Round(torch.autograd.Function):
    """Round to the autocast dtype in the forward pass only: the gradient of the master weight stays in full precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype, high: torch.dtype) -> Tensor:
        return x.to(low).to(high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _final_logits(logits_TV: Tensor, options: HeadOptions) -> Tensor:
    """Logit scale, then softcap."""
    scaled_TV = logits_TV * options.logit_scale if options.logit_scale != 1 else logits_TV
    return scaled_TV if options.softcap is None else softcapped(scaled_TV, options.softcap)


def _dense_stats(
    logits_TV: Tensor,
    targets: Targets,
    options: HeadOptions,
    plan: StatisticsPlan,
    weight_VD: Tensor | None,
    shift_T: Tensor | None = None,
) -> TokenStats:
    """Every planned statistic from its definition; `weight_VD` in compute precision, `shift_T` = w̄·u + b̄."""
    row_max_T = logits_TV.amax(dim=1)
    picked_T = logits_TV.gather(1, targets.index_T.unsqueeze(1)).squeeze(1)
    mean_T = logits_TV.mean(dim=1) if plan.mu else None
    p_norm_T = gain_T = gain_centered_T = entropy_T = None
    if plan.entropy:
        log_p_TV = torch.log_softmax(logits_TV, dim=1)
        entropy_T = -torch.where(log_p_TV == -torch.inf, 0, log_p_TV.exp() * log_p_TV).sum(dim=1)
    if plan.p_norm:
        p_TV = torch.softmax(logits_TV, dim=1)
        p_norm_T = p_TV.norm(dim=1)
        if plan.gain:
            assert weight_VD is not None
            scaled_VD = options.logit_scale * weight_VD
            slope = 1 if options.softcap is None else softcap_slope(logits_TV, options.softcap)
            gain_T = ((p_TV * slope) @ scaled_VD).norm(dim=1) / p_norm_T
            if plan.gain_centered:
                gain_centered_T = (p_TV @ scaled_VD - scaled_VD.mean(dim=0)).norm(dim=1) / p_norm_T
    return TokenStats(
        row_max=row_max_T,
        log_s=torch.logsumexp(logits_TV - row_max_T.unsqueeze(1), dim=1),
        target_logit=torch.where(targets.valid_T, picked_T, 0),
        valid=targets.valid_T,
        vocab=logits_TV.shape[1],
        mu=mean_T,
        p_norm=p_norm_T,
        gain=gain_T,
        gain_centered=gain_centered_T,
        entropy=entropy_T,
        predicted=logits_TV.argmax(dim=1) if plan.predicted else None,
        mu_residual=None if shift_T is None or mean_T is None else mean_T - shift_T,
    )
