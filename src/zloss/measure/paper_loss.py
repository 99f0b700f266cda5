"""The loss of the paper's training path: the head module computes logits in the autocast dtype, then CE and Z are
computed from them in fp32. Training runs with `head="paper"` and the overflow audit use it.

For a method that deploys a centered head, the common shift of the logits is subtracted in fp32 first
(`centered_logits_from_raw`). On this path Centered head and CE differ by rounding, as in the paper.
"""

from __future__ import annotations

from torch import Tensor

from zloss.errors import CoordinateError
from zloss.head.loss import HeadLossOutput, logits_loss
from zloss.head.source import centered_logits_from_raw
from zloss.models.output_head import OutputHead
from zloss.objectives import CenteredHead, CenteredZLoss, CrossEntropy, Objective, StandardZLoss
from zloss.tensors import at_least_fp32


def paper_loss(
    head: OutputHead, hidden: Tensor, target: Tensor, objective: Objective, normalizer: float | None = None
) -> HeadLossOutput:
    """Σ over the batch of CE + auxiliary of materialized logits, divided by `normalizer`; None: by the number of targets."""
    if objective.coordinate == "centered" and head.softcap is not None:
        raise CoordinateError(
            f"{type(objective).__name__} needs the mean logit μ, which is undefined for softcapped logits. "
            "Use StandardZLoss."
        )
    logits = head.module(hidden) * head.logit_scale
    if objective.coordinate == "centered":
        scaled_bias = None if head.bias_V is None else head.bias_V * head.logit_scale
        logits = centered_logits_from_raw(logits, hidden, head.weight_VD * head.logit_scale, scaled_bias)
        objective = _on_deployed(objective)
    return logits_loss(
        at_least_fp32(logits),
        target,
        objective,
        # The gain costs one more product of the size of the logits, so it is formed only where the loss needs it.
        # The logits are scaled already, so the head they come from is the scaled one.
        weight=head.weight_VD * head.logit_scale if objective.needs_gain else None,
        normalizer=normalizer,
        softcap=head.softcap,
        backend="dense",
    )


def _on_deployed(objective: Objective) -> Objective:
    """The objective to apply to logits that are centered already: the method itself without its centering."""
    if isinstance(objective, CenteredZLoss):
        return StandardZLoss(objective.coef, objective.target)
    return CrossEntropy() if isinstance(objective, CenteredHead) else objective
