"""A language model that returns its loss, so that whatever wraps a model (autocast, data parallel) wraps the head as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
from zloss.statistics import TokenStats
from zloss.train.data import TrainData
from zloss.train.moe import RouterTerms, RoutingTap, load_balancing, router_z_loss, routing_record


def run_objective(config: TrainConfig) -> Objective:
    """The registered objective of the run's method, with its coefficient, target and β."""
    made: Any = make_objective(config.method, config.coef)
    own = {field.name for field in fields(made)}
    changes: dict[str, Any] = {}
    if config.target is not None:
        changes |= {name: config.target for name in ("target", "relative_target") if name in own}
    if "beta" in own:
        changes["beta"] = config.gain_beta
    objective: Objective = replace(made, **changes) if changes else made
    return objective


def run_loss(config: TrainConfig, checkpoint: Checkpoint, data: TrainData) -> LossModel | MoeLossModel:
    """Token ids and targets to the loss that the run's configuration states."""
    objective = run_objective(config)
    if config.moe is None:
        return LossModel(checkpoint, objective, config.head, data.train.counted)
    return MoeLossModel(checkpoint, objective, config.head, data.train.counted, config.moe)


class LossModel(nn.Module):
    """Token ids and targets to the loss of an objective.

    "fused": hidden states go straight into `head_loss`, and no logits are kept. "paper": logits are materialized, see
    `zloss.measure.paper_loss`.
    """

    def __init__(
        self, checkpoint: Checkpoint, objective: Objective, kind: HeadKind, counted: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = checkpoint.model
        self._checkpoint, self._objective, self._kind, self._counted = checkpoint, objective, kind, counted

    def forward(self, inputs_BN: Tensor, targets_BN: Tensor, normalizer: float) -> HeadLossOutput:
        """Σ over the batch of CE + auxiliary, divided by `normalizer`."""
        head = find_head(self._checkpoint)  # at every call: its weight is the one that the module has now
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


@dataclass(frozen=True)
class MoeLossOutput:
    """As the output of `head_loss`; `auxiliary` is everything but CE."""

    loss: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor
    stats: TokenStats
    router: RouterTerms


class MoeLossModel(nn.Module):
    """Token ids and targets to CE (+ head Z) + load balancing + router Z."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        objective: Objective,
        kind: HeadKind,
        counted: Callable[[Tensor], Tensor],
        moe: MoeRun,
    ) -> None:
        super().__init__()
        self.head_model = LossModel(checkpoint, objective, kind, counted)
        self._moe, self._tap = moe, RoutingTap(checkpoint.model, counted)

    def forward(self, inputs_BN: Tensor, targets_BN: Tensor, step_tokens: int) -> MoeLossOutput:
        """The part of one forward pass in the loss of a step of `step_tokens` tokens."""
        moe = self._moe
        with self._tap.listening():
            head = self.head_model(inputs_BN, targets_BN, step_tokens)
        routing = self._tap.take(inputs_BN)
        with torch.autocast(head.loss.device.type, enabled=False):
            balance = load_balancing(routing, moe)
            balance_term = moe.load_balance * (routing.tokens / step_tokens) * balance
            router_z = router_z_loss(routing, moe, step_tokens)
            loss = head.loss + balance_term + router_z
            terms = RouterTerms(
                balance.detach(),
                balance_term.detach(),
                router_z.detach(),
                routing_record(routing, moe, step_tokens, self._tap.weights(moe.experts)),
                routing.dropped(moe.top_k),
            )
        return MoeLossOutput(loss, head.cross_entropy, loss.detach() - head.cross_entropy, head.stats, terms)
