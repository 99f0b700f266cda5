"""OLMo-core: a language-modeling head that trains CE + Z, its configuration, and a callback that records both separately.

    config.lm_head = ZLossLMHeadConfig.of(config.lm_head, coef=1e-5, target=0.0)
    trainer_config = trainer_config.with_callback("zloss", ZLossCallback())

Leave `z_loss_multiplier` of the train module at None: the head adds Z itself. In evaluation the head returns CE.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnsupportedModelError, require_version
from zloss.head.loss import head_loss
from zloss.objectives import Objective, make_objective, require_target

LEAST_OLMO_CORE = "3.0"
try:
    from olmo_core.nn.lm_head import LMHead, LMHeadConfig, LMHeadType, LMLossImplementation, LMOutputWithLoss
    from olmo_core.train import ReduceType
    from olmo_core.train.callbacks import Callback
except ImportError as error:
    raise MissingDependencyError(f"ai2-olmo-core>={LEAST_OLMO_CORE}", "ZLossLMHead", "olmo") from error
require_version("ai2-olmo-core", LEAST_OLMO_CORE, "ZLossLMHead", "olmo")

METRICS = ("zloss/ce", "zloss/z", "zloss/log_z")


class ZLossLMHead(LMHead):  # type: ignore[misc]
    """OLMo-core's `LMHead` with CE + Z as its training loss, from hidden states and `w_out` without storing logits.

    `step_means` has CE, Z and log Z per token, summed over the micro-batches of a step; None before the first.
    """

    def __init__(self, *, objective: Objective, **options: Any) -> None:
        require_target(objective)
        super().__init__(**options)
        if self.loss_implementation != LMLossImplementation.default:
            raise UnsupportedModelError(
                f"`loss_implementation` is expected to be 'default' with a Z-loss of zloss, which replaces it, but got "
                f"{str(self.loss_implementation)!r}."
            )
        self.objective = objective
        self.step_means: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        *,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        loss_reduction: Any = "mean",
        z_loss_multiplier: float | None = None,
        loss_div_factor: Tensor | float | None = None,
        return_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        """As `LMHead.forward`; with `labels` in training mode the loss is CE + Z and logits are returned only on request."""
        if z_loss_multiplier is not None:
            raise InputError(
                f"z_loss_multiplier={z_loss_multiplier!r} would count Z twice: leave it at None in the train module; this "
                "head adds Z itself (and OLMo-core 3.0.0 trains 1e-4 where it is 0.0)."
            )
        if labels is None or not self.training:
            given = {"ignore_index": ignore_index, "loss_reduction": loss_reduction, "loss_div_factor": loss_div_factor}
            return super().forward(
                x, labels=labels, return_logits=return_logits, logits_to_keep=logits_to_keep, **given
            )
        if (self.tp_enabled and loss_reduction == "none") or not (
            isinstance(logits_to_keep, int) and logits_to_keep == 0
        ):
            raise InputError(
                "in training this head supports neither `logits_to_keep` nor, under TP, loss_reduction='none'."
            )
        h = x if self.norm is None else self.norm(x)
        out = head_loss(
            h,
            self.w_out.weight,
            labels,
            self.objective,
            bias=self.w_out.bias,
            ignore_index=ignore_index,
            reduction=loss_reduction,
            statistics="light",
        )
        # Every rank of a TP group has the loss of all its tokens; context-parallel ranks have their own tokens.
        divisor: Any = 1 if loss_div_factor is None else loss_div_factor
        if self._cp_mesh is not None and loss_div_factor is not None:
            divisor = divisor / self._cp_mesh.size()
        loss, ce, z = (part / divisor for part in (out.loss, out.cross_entropy, out.auxiliary))
        log_z = torch.where(out.stats.valid, out.stats.log_z, 0).sum() / (divisor * out.denominator)
        means = torch.stack([ce.sum(), z.sum(), log_z])
        self.step_means = means if self.step_means is None else self.step_means + means
        return LMOutputWithLoss(self.w_out(h) if return_logits else None, loss, ce, z)


@dataclass
class ZLossLMHeadConfig(LMHeadConfig):  # type: ignore[misc]
    """The configuration of a `ZLossLMHead`: that of an `LMHead`, and the objective by its name on our command line."""

    objective: str = "standard"
    coef: float | None = None
    target: float | None = None

    @classmethod
    def of(
        cls, head: LMHeadConfig, *, coef: float | None, target: float | None, objective: str = "standard"
    ) -> ZLossLMHeadConfig:
        """The configuration `head`, with a Z-loss added."""
        if head.name != LMHeadType.default:
            raise UnsupportedModelError(f"a head of type 'default' is expected, but got {str(head.name)!r}.")
        kept = {field.name: getattr(head, field.name) for field in fields(LMHeadConfig)}
        return cls(**kept, coef=coef, target=target, objective=objective)

    def build(self, *, d_model: int, vocab_size: int, init_device: str = "cpu") -> ZLossLMHead:
        options = {"bias": self.bias} if self.bias is not None else {}
        return ZLossLMHead(
            objective=make_objective(self.objective, self.coef, target=self.target),
            d_model=d_model,
            vocab_size=vocab_size,
            layer_norm=self.layer_norm,
            dtype=self.dtype.as_pt(),
            init_device=init_device,
            loss_implementation=self.loss_implementation,
            **options,
        )


@dataclass
class ZLossCallback(Callback):  # type: ignore[misc]
    """Records `zloss/ce`, `zloss/z` and `zloss/log_z`, nats per token of the step, averaged over ranks."""

    def head(self) -> ZLossLMHead:
        trained = self.trainer.train_module
        if any(part.pp_enabled for part in getattr(trained, "model_parts", ())):
            raise UnsupportedModelError("pipeline parallelism is not supported with a ZLossLMHead: drop `pp_config`.")
        model = trained.model
        for module in model.modules():
            if isinstance(module, ZLossLMHead):
                return module
        raise UnsupportedModelError(
            f"{type(model).__name__} has no ZLossLMHead: set `config.lm_head = ZLossLMHeadConfig.of(config.lm_head, ...)` "
            "before the model is built."
        )

    def pre_step(self, batch: dict[str, Any]) -> None:
        self.head().step_means = None

    def post_train_batch(self) -> None:
        means = self.head().step_means
        if means is not None:
            for name, value in zip(METRICS, means, strict=True):
                self.trainer.record_metric(name, value, ReduceType.mean)
