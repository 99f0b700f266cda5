"""A language model that returns its loss, so that whatever wraps a model (autocast, data parallel) wraps the head as well.

"fused": hidden states go straight into `head_loss`, and no logits are kept. "paper": the head module computes logits in
the autocast dtype, centered deployment subtracts their common shift in fp32 (`centered_logits_from_raw`), and CE and Z
are taken in fp32 of what is left. There Centered head and CE differ, as in the paper: by what rounding does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, find_head, hidden_states
from zloss.results.choices import HeadKind
from zloss.source.listing import centered_logits_from_raw
from zloss.source.objective import Objective
from zloss.source.objectives.centered import CenteredZLoss
from zloss.source.objectives.centered_head import CenteredHead
from zloss.source.objectives.cross_entropy import CrossEntropy
from zloss.source.objectives.standard import StandardZLoss
from zloss.transport.head_loss import HeadLossOutput, head_loss
from zloss.transport.logits_loss import logits_loss


class LossModel(nn.Module):
    """Token ids and targets to the loss of an objective."""

    def __init__(
        self, checkpoint: Checkpoint, objective: Objective, kind: HeadKind, counted: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = checkpoint.model
        self._checkpoint, self._objective, self._kind, self._counted = checkpoint, objective, kind, counted

    @property
    def head(self) -> OutputHead:
        """Found anew: the weight of the module is what trains."""
        return find_head(self._checkpoint)

    def forward(self, inputs_BN: Tensor, targets_BN: Tensor, normalizer: float) -> HeadLossOutput:
        """Σ over the batch of CE + auxiliary, divided by `normalizer`."""
        head = self.head
        with hidden_states(self._checkpoint, head) as hidden_of:
            hidden = self._counted(hidden_of(inputs_BN))
        if self._kind == "fused":
            return head_loss(
                hidden,
                head.weight_VD,
                targets_BN,
                self._objective,
                bias=head.bias_V,
                normalizer=normalizer,
                logit_scale=head.logit_scale,
                softcap=head.softcap,
            )
        return paper_loss(head, hidden, targets_BN, self._objective, normalizer)


def paper_loss(
    head: OutputHead, hidden: Tensor, target: Tensor, objective: Objective, normalizer: float
) -> HeadLossOutput:
    """The paper's training path: materialised logits, centered by their fp32 common shift where the method deploys so."""
    logits = head.module(hidden) * head.logit_scale
    if objective.coordinate == "centered":
        scaled_bias = None if head.bias_V is None else head.bias_V * head.logit_scale
        logits = centered_logits_from_raw(logits, hidden, head.weight_VD * head.logit_scale, scaled_bias)
        objective = _on_deployed(objective)
    return logits_loss(
        logits.float() if logits.dtype != torch.float64 else logits,
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
    """A method in centered coordinates as it acts on logits that are centered already: not centered a second time."""
    if isinstance(objective, CenteredZLoss):
        return StandardZLoss(objective.coef, objective.target)
    return CrossEntropy() if isinstance(objective, CenteredHead) else objective
