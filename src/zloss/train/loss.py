"""A language model that returns its loss, so that whatever wraps a model (autocast, data parallel) wraps the head as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from zloss.head.loss import HeadLossOutput, head_loss
from zloss.measure.paper_loss import paper_loss
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.objectives import Objective, make_objective
from zloss.results.options import HeadKind
from zloss.results.run_config import MoeRun, TrainConfig
from zloss.text import Blocks
from zloss.train.moe import RouterTerms, RoutingTap, router_terms


def run_objective(config: TrainConfig) -> Objective:
    """The registered objective of the run's method, with its coefficient, target and β."""
    made: Any = make_objective(config.method, config.coef)
    changes: dict[str, Any] = {"beta": config.gain_beta}
    if config.target is not None:
        changes |= {"target": config.target, "relative_target": config.target}
    names = {field.name for field in fields(made)}
    objective: Objective = replace(made, **{name: value for name, value in changes.items() if name in names})
    return objective


def run_loss(config: TrainConfig, checkpoint: Checkpoint, blocks: Blocks) -> LossModel:
    """Token ids and targets of `blocks` to the loss that the run's configuration states."""
    return LossModel(checkpoint, run_objective(config), config.head, blocks.counted, config.moe)


class LossModel(nn.Module):
    """Token ids and targets to the loss of an objective, with experts to CE (+ head Z) + load balancing + router Z.

    "fused": hidden states go straight into `head_loss`, and no logits are kept. "paper": logits are materialized, see
    `zloss.measure.paper_loss`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        objective: Objective,
        kind: HeadKind,
        counted: Callable[[Tensor], Tensor],
        moe: MoeRun | None = None,
    ) -> None:
        super().__init__()
        self.model = checkpoint.model
        self._checkpoint, self._objective, self._kind, self._counted = checkpoint, objective, kind, counted
        self._moe, self._tap = moe, None if moe is None else RoutingTap(checkpoint.model, counted)

    def forward(
        self, inputs_BN: Tensor, targets_BN: Tensor, step_tokens: int
    ) -> tuple[HeadLossOutput, RouterTerms | None]:
        """The part of one forward pass in the loss of a step of `step_tokens` tokens, and the routers' part of it.

        With experts the `auxiliary` of the loss is everything but CE.
        """
        if self._moe is None or self._tap is None:
            return self._head_loss(inputs_BN, targets_BN, step_tokens), None
        head, routing = self._tap.observe(lambda: self._head_loss(inputs_BN, targets_BN, step_tokens), len(inputs_BN))
        with torch.autocast(head.loss.device.type, enabled=False):
            weights = self._tap.weights(self._moe.experts)
            balance, router_z, terms = router_terms(routing, self._moe, step_tokens, weights)
            loss = head.loss + balance + router_z
        return replace(head, loss=loss, auxiliary=loss.detach() - head.cross_entropy), terms

    def _head_loss(self, inputs_BN: Tensor, targets_BN: Tensor, normalizer: int) -> HeadLossOutput:
        """Σ over the batch of CE + auxiliary, divided by `normalizer`."""
        head = find_head(self._checkpoint)  # at every call: its weight is the one that the module has now
        with hidden_states(self._checkpoint, head) as hidden_of:
            hidden = self._counted(hidden_of(inputs_BN))
        if self._kind == "paper":
            return paper_loss(head, hidden, targets_BN, self._objective, normalizer)
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
