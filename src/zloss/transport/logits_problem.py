"""The public border of the loss from logits: every argument checked once, tokens flattened to one axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.errors import CoordinateError, MissingInputError, ShapeError
from zloss.source.statistics import TokenStats
from zloss.transport.backends.rows import check_rows
from zloss.transport.problem import (
    Options,
    Targets,
    check_mu_need,
    check_options,
    check_same_device,
    check_tensors,
    check_vocab,
    compute_dtype,
    may_read,
    prepare_targets,
)


@dataclass(frozen=True)
class LogitsProblem:
    """A validated loss of logits: z = logit_scale·logits[:, :vocab], softcapped where asked."""

    logits_TV: Tensor
    """Padding columns included; the first `vocab` are inside log Z."""
    weight_VD: Tensor | None
    targets: Targets
    vocab: int
    dtype: torch.dtype
    """In which everything is computed: fp64 for fp64 inputs, else fp32."""
    grad_enabled: bool
    options: Options


def prepare_logits(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: Options,
    token_weight: Tensor | None,
    normalizer: float | Tensor | None,
    valid_vocab: int | None,
) -> LogitsProblem:
    """Check everything the user passed and flatten the leading dimensions."""
    check_options(options)
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
    check_mu_need(options, has_mu=options.softcap is None)
    vocab = check_vocab(valid_vocab, rows)
    dtype = compute_dtype(logits, weight)
    targets = prepare_targets(
        target, logits.shape[:-1], vocab, options, dtype, token_weight=token_weight, normalizer=normalizer
    )
    flat_TV = logits.reshape(-1, rows)
    return LogitsProblem(flat_TV, weight, targets, vocab, dtype, torch.is_grad_enabled(), options)


def check_stats(stats: TokenStats, options: Options) -> None:
    """-inf logits that leave no distribution, or no mean where one is needed. Reads values, so on the CPU only."""
    check_rows(stats)
    needs_mu = options.objective.active and options.objective.needs_mu
    if stats.mu is None or not may_read(stats.mu) or not (needs_mu or options.label_smoothing):
        return
    if bool((torch.isneginf(stats.mu) & stats.valid).any()):
        what = type(options.objective).__name__ if needs_mu else "`label_smoothing`"
        raise CoordinateError(
            f"{what} needs the mean logit μ, but some logits are -inf. "
            "Exclude masked columns with `valid_vocab`, or use StandardZLoss."
        )
