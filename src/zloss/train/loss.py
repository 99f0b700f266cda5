"""A language model that returns its loss, so that whatever wraps a model (autocast, data parallel) wraps the head as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import TiedHeadError
from zloss.head.loss import HeadLossOutput, head_loss
from zloss.measure.paper_loss import paper_loss
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.objectives import CrossEntropy, Objective, make_objective, objective_names
from zloss.results.options import HeadKind
from zloss.results.run_config import MU_CENTERING, MU_LOSS, MoeRun, TrainConfig
from zloss.text import Blocks
from zloss.train.moe import RouterTerms, RoutingTap, router_terms


def method_names() -> tuple[str, ...]:
    """Every method that a run can have."""
    return (*objective_names(), MU_LOSS, MU_CENTERING)


def run_objective(config: TrainConfig, coef: float | None = None) -> Objective:
    """What the run's method adds to every token, with its target and β; `coef` replaces its coefficient.

    Methods on the mean row of the head add nothing to a token.
    """
    if config.method in (MU_LOSS, MU_CENTERING):
        return CrossEntropy()
    made: Any = make_objective(config.method, config.coef if coef is None else coef)
    changes: dict[str, Any] = {"beta": config.gain_beta}
    if config.target is not None:
        changes |= {"target": config.target, "relative_target": config.target}
    names = {field.name for field in fields(made)}
    objective: Objective = replace(made, **{name: value for name, value in changes.items() if name in names})
    return objective


def unscaled_penalty(config: TrainConfig, output: HeadLossOutput, weight_VD: Tensor) -> float:
    """What this micro-batch adds to the penalty of its step at λ (or γ) = 1, whether the penalty is on or off."""
    tokens = int(output.stats.valid.sum())
    if config.method == MU_LOSS:
        mean_row_squared = weight_VD.detach().mean(dim=0, dtype=torch.float64).square().sum()
        return float(mean_row_squared) * tokens / config.tokens_per_step
    return float(run_objective(config, 1.0).source(output.stats)[0].sum()) / config.tokens_per_step


def run_loss(config: TrainConfig, checkpoint: Checkpoint, blocks: Blocks) -> LossModel:
    """Token ids and targets of `blocks` to the loss that the run's configuration states."""
    if config.method == MU_CENTERING and config.pretrained and not config.untie and find_head(checkpoint).tied:
        raise TiedHeadError(
            f"the head of {checkpoint.name} is tied, so mu-centering would also move the input embedding that the pretrained "
            "layers expect: untie it first (`untie` of zloss train)."
        )
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
        self.objective = objective
        """The objective of the next step."""
        self._checkpoint, self._kind, self._counted = checkpoint, kind, counted
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
        head = find_head(self._checkpoint)  # at every call, because the module may have another weight by now
        with hidden_states(self._checkpoint, head) as hidden_of:
            hidden = self._counted(hidden_of(inputs_BN))
        if self._kind == "paper":
            return paper_loss(head, hidden, targets_BN, self.objective, normalizer)
        return head_loss(
            hidden,
            head.weight_VD,
            targets_BN,
            self.objective,
            bias=head.bias_V,
            normalizer=normalizer,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
        )
