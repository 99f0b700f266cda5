"""A mixture of experts that returns its loss: CE (+ head Z) + load balancing + router Z, each term apart.

The balancing term is the model class's own (`load_balancing_loss_func` of OLMoE): E Σ_e f_e P_e with f_e the routes per
token that expert e received, so it is about k at balance, not 1. It is not linear in the batch: every micro-batch has its
own, weighted by its share of the step's tokens. The router Z-loss is linear in the batch and uses the step's counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import MissingDependencyError
from zloss.models.checkpoint import Checkpoint
from zloss.objectives import Objective
from zloss.results.choices import HeadKind
from zloss.results.moe_config import REFERENCE, MoeRun
from zloss.router.loss import RouterLoss, router_loss
from zloss.statistics import TokenStats
from zloss.train.moe.reduction import reduced_router_loss
from zloss.train.moe.router_variant import applied_coef, expert_capacity, router_target
from zloss.train.moe.routing import Routing, RoutingTap
from zloss.train.step.loss_model import LossModel


@dataclass(frozen=True)
class RouterTerms:
    """The routers' part of one forward pass, detached."""

    load_balance: Tensor
    """The model's balancing term of this pass, without its coefficient: about k at balance."""
    load_balance_term: Tensor
    """What it adds to the step's loss."""
    router_z: Tensor
    """What the router Z-loss adds to the step's loss, by the reduction as it is written."""
    record: RouterLoss
    """Statistics of the decisions; its `loss` is the same router Z-loss in factor form."""
    dropped: float = 0.0
    """Share of routes that the model did not take."""


@dataclass(frozen=True)
class MoeLossOutput:
    """As the output of `head_loss`; `auxiliary` is everything beside CE."""

    loss: Tensor
    cross_entropy: Tensor
    auxiliary: Tensor
    stats: TokenStats
    router: RouterTerms


class MoeLossModel(nn.Module):
    """Token ids and targets to the loss of an objective and its routers."""

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


def load_balancing(routing: Routing, moe: MoeRun) -> Tensor:
    """The balancing term of the model class on the counted tokens, without its coefficient."""
    try:
        from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func
    except ImportError as error:
        raise MissingDependencyError("transformers", "The mixture-of-experts model", "train") from error
    balancing: Any = load_balancing_loss_func
    found: Tensor = balancing(tuple(logits_TE.float() for logits_TE in routing.logits), moe.experts, moe.top_k)
    return found


def router_z_loss(routing: Routing, moe: MoeRun, step_tokens: int) -> Tensor:
    """The router Z-loss of the run's variant; exactly 0, without a gradient, when it is off."""
    coef = applied_coef(moe)
    if moe.convention is None or not coef:
        return torch.zeros((), device=routing.logits[0].device)
    return reduced_router_loss(
        routing,
        convention=moe.convention,
        coef=coef,
        target=router_target(moe),
        step_tokens=step_tokens,
    )


@torch.no_grad()
def routing_record(routing: Routing, moe: MoeRun, step_tokens: int, weights: list[Tensor]) -> RouterLoss:
    """Entropy, load, log Z and what the loss applies to each decision."""
    return router_loss(
        [logits_TE.detach() for logits_TE in routing.logits],
        coef=applied_coef(moe),
        convention=moe.convention or REFERENCE,
        top_k=moe.top_k,
        target=router_target(moe),
        weight=weights,
        capacity=expert_capacity(moe, routing.tokens),
        normalizer=step_tokens,
    )
