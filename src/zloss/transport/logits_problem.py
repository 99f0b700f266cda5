"""A loss from logits: its arguments checked once, its tokens flattened to one axis.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.errors import MissingInputError, ShapeError
from zloss.transport.options import HeadOptions
from zloss.transport.statistics_plan import StatisticsPlan, plan_statistics
from zloss.transport.targets import Targets, prepare_targets
from zloss.transport.tensor_arguments import check_same_device, check_tensors, compute_dtype


@dataclass(frozen=True)
class LogitsProblem:
    """A validated loss of logits: z = logit_scale·logits[:, :vocab], softcapped where asked."""

    logits_TV: Tensor
    """Padding columns included; the first `vocab` are inside log Z."""
    weight_VD: Tensor | None
    """The head, for the gain; it gets no gradient."""
    targets: Targets
    vocab: int
    dtype: torch.dtype
    """In which everything is computed: fp64 for fp64 inputs, else fp32."""
    plan: StatisticsPlan
    """The statistics to return."""
    grad_enabled: bool
    """Grad mode of the caller; inside an autograd.Function it reads as off."""
    options: HeadOptions

    def with_logits(self, logits_TV: Tensor) -> LogitsProblem:
        return replace(self, logits_TV=logits_TV)


def prepare_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: HeadOptions,
    *,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> LogitsProblem:
    """Check the tensors against each other and the options, and flatten the leading dimensions."""
    check_tensors(logits=logits, target=target, weight=weight, token_weight=token_weight)
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ShapeError(
            f"`logits` is expected to be a float tensor [..., V], but got {logits.dtype} {list(logits.shape)}."
        )
    rows = logits.shape[-1]
    if weight is not None and (weight.dim() != 2 or weight.shape[0] != rows):
        raise ShapeError(
            f"`weight` is expected to be [V, D] with V = {rows} (the logits), but got {list(weight.shape)}."
        )
    if options.objective.active and options.objective.needs_gain and weight is None:
        raise MissingInputError(
            f"{type(options.objective).__name__} needs the output-to-hidden gain: pass `weight`, the [V, D] output head."
        )
    check_same_device(logits=logits, target=target, weight=weight, token_weight=token_weight)
    vocab = options.vocab_of(rows)
    dtype = compute_dtype(logits, weight)
    targets = prepare_targets(
        target, logits.shape[:-1], vocab, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    plan = plan_statistics(
        options.objective,
        options.statistics,
        label_smoothing=options.label_smoothing,
        has_mu=options.softcap is None,
        has_head=weight is not None,
        has_hidden=False,
    )
    return LogitsProblem(
        logits.reshape(-1, rows), weight, targets, vocab, dtype, plan, torch.is_grad_enabled(), options
    )
