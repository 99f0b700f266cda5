"""NeMo AutoModel: CE + Z as the `loss_fn` of a recipe, and a recipe that logs the two separately.

recipe: zloss.integrations.nemo.ZLossRecipe
loss_fn:
  _target_: zloss.integrations.nemo.ZLossCrossEntropy
  coef: 1.0e-4
  target: 0.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zloss.errors import MissingDependencyError, UnsupportedModelError
from zloss.head.loss import HeadLossOutput, head_loss
from zloss.objectives import CrossEntropy, make_objective
from zloss.telemetry.trackers import for_trackers
from zloss.telemetry.window import StepWindow, TokenTotals, micro_batch

LEAST_NEMO = "0.7"
try:
    from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy
except ImportError as error:
    raise MissingDependencyError(f"nemo-automodel>={LEAST_NEMO}", "ZLossCrossEntropy", "nemo") from error


class ZLossCrossEntropy(LinearCrossEntropy):  # type: ignore[misc]
    """CE + Z from the final hidden states and the LM head, without logits; CE alone where gradients are off (validation).

    `target`: c; most codebases use 0, null is log V. Scaling: the sum over valid tokens, divided by `num_label_tokens`, the
    valid tokens of the whole step on all ranks. `last` is the output of the last training call of the main head, and every
    function in `observers` is called with each. While `main` is False, as `ZLossRecipe` sets it for the depths of multi-token
    prediction, the loss is CE.
    """

    def __init__(
        self,
        *,
        coef: float | None,
        target: float | None,
        objective: str = "standard",
        ignore_index: int = -100,
        logit_softcapping: float = 0.0,
    ) -> None:
        super().__init__()
        self.objective = make_objective(objective, coef, target=target)
        self.ignore_index, self.logit_softcapping = ignore_index, logit_softcapping
        self.main = True
        self.last: HeadLossOutput | None = None
        self.observers: list[Callable[[TokenTotals], None]] = []

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: Any = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """The arguments of AutoModel's other linear losses. [B, S, D], [B, S] and [V, D] → a scalar."""
        out = head_loss(
            hidden_states,
            self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group),
            labels,
            self.objective if self.main else CrossEntropy(),
            ignore_index=self.ignore_index,
            reduction="sum" if loss_weights is None else "none",
            softcap=self.logit_softcapping or None,
        )
        if torch.is_grad_enabled() and self.main:
            self.last = replace(out, loss=out.loss.detach())
            for observe in self.observers:
                observe(micro_batch(self.last, "sum"))  # without weights
        loss = out.loss if torch.is_grad_enabled() else out.cross_entropy
        if loss_weights is not None:
            loss = (loss * loss_weights).sum()
        return loss if num_label_tokens is None else loss / max(num_label_tokens, 1)


def __getattr__(name: str) -> Any:
    """`ZLossRecipe` imports AutoModel's trainer, which takes seconds: on first use."""
    if name != "ZLossRecipe":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _recipe()
    return globals()[name]


def _recipe() -> type:
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    class ZLossRecipe(TrainFinetuneRecipeForNextTokenPrediction):  # type: ignore[misc]
        """AutoModel's recipe with `zloss/…` scalars of every step among its metrics."""

        def setup(self) -> None:
            super().setup()
            if not isinstance(self.loss_fn, ZLossCrossEntropy):
                raise UnsupportedModelError(
                    f"AutoModel replaced the loss with {type(self.loss_fn).__name__}, so Z would be left out: ZLossRecipe needs "
                    "`loss_fn._target_: zloss.integrations.nemo.ZLossCrossEntropy`, a model whose `forward` takes "
                    "`logits_to_keep`, and no pipeline parallelism."
                )
            self.zloss_window = StepWindow(1, self.loss_fn.objective.coordinate, across_ranks=True)
            self.loss_fn.observers.append(self.zloss_window.add)
            # The first loss after a forward pass is that of the main head; others are those of multi-token prediction.
            self.model_parts[0].register_forward_pre_hook(lambda *_: setattr(self.loss_fn, "main", True))
            self.loss_fn.register_forward_hook(lambda *_: setattr(self.loss_fn, "main", False))

        def log_train_metrics(self, log_data: Any) -> None:
            self.zloss_window.end_step(log_data.metrics["grad_norm"])
            log_data.metrics |= for_trackers(self.zloss_window.scalars())
            super().log_train_metrics(log_data)

    return ZLossRecipe
