"""A language model that returns its loss, so that whatever wraps a model (autocast, data parallel) wraps the head as well.

"fused": hidden states go straight into `head_loss`, and no logits are kept. "paper": logits are materialised, see
`zloss.measure.paper_loss`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from zloss.head.loss import HeadLossOutput, head_loss
from zloss.measure.paper_loss import paper_loss
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, find_head, hidden_states
from zloss.objectives import Objective
from zloss.results.choices import HeadKind


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
        """The output head, looked up at every call: its weight is the one the module has now."""
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
