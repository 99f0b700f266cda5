"""Logits of -inf: a row must keep at least one finite logit, and a mean over the vocabulary needs all of them.

Both checks read values, so they run on the CPU only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.errors import CoordinateError
from zloss.source.statistics import TokenStats
from zloss.transport.options import HeadOptions
from zloss.transport.tensor_arguments import may_read


def check_rows(stats: TokenStats) -> None:
    """Refuse a counted token whose every logit is -inf: it has no distribution."""
    if not may_read(stats.row_max):
        return
    # A row of NaN has no maximum either, but it is a diverged model, whose loss is NaN, and not a masking mistake.
    empty = torch.isneginf(stats.row_max) & stats.valid & ~torch.isnan(stats.target_logit)
    if bool(empty.any()):
        first = int(empty.nonzero()[0, 0])
        raise CoordinateError(
            f"token {first} (of {int(empty.sum())} such) has only -inf logits, so it has no distribution: "
            "set its target to `ignore_index`, or unmask at least one vocabulary entry."
        )


def needs_mean(options: HeadOptions) -> bool:
    """Whether the loss itself uses the mean logit."""
    return options.label_smoothing != 0 or (options.objective.active and options.objective.needs_mu)


def check_mean(mean_T: Tensor | None, valid_T: Tensor, options: HeadOptions) -> None:
    """Refuse a loss that uses the mean logit where a counted token has logits of -inf."""
    if mean_T is None or not may_read(mean_T) or not needs_mean(options):
        return
    if bool((torch.isneginf(mean_T) & valid_T).any()):
        objective = options.objective
        what = type(objective).__name__ if objective.active and objective.needs_mu else "`label_smoothing`"
        raise CoordinateError(
            f"{what} needs the mean logit μ, but some logits are -inf. "
            "Exclude masked columns with `valid_vocab`, or use StandardZLoss."
        )
