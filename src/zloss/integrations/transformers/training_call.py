"""One training forward of a model: its head returns lazy logits, and its cross-entropy is answered by `head_loss`."""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch import Tensor, nn

from zloss.errors import UnsupportedModelError
from zloss.head.loss import HeadLossOutput, head_loss
from zloss.head.options import Reduction, check_reduction
from zloss.integrations.transformers.head_operands import head_operands, output_head, vocabulary
from zloss.integrations.transformers.lazy_logits import CrossEntropyRequest, LazyLogits, LogitTransform
from zloss.integrations.transformers.settings import Settings


class TrainingCall:
    """The head's forward is replaced for the length of one call of the model: nothing stays on the model between calls.

    The loss is evaluated inside a second call of the head module, so that the head's own hooks (FSDP2, accelerate)
    gather its weight for it.
    """

    def __init__(self, model: nn.Module, settings: Settings, *, per_token: bool) -> None:
        self.model_name = type(model).__name__
        self.per_token = per_token
        self.losses = 0
        self.output: HeadLossOutput | None = None
        self.reduction: Reduction = "mean"
        self._settings = settings
        self._head = output_head(model)
        self._pending: tuple[LazyLogits, CrossEntropyRequest] | None = None
        # accelerate's device hooks wrap `forward` and keep the head's own under this name.
        self._place = "_old_forward" if hasattr(self._head, "_hf_hook") else "forward"
        self._before: Any = None

    def arm(self) -> None:
        """Put our forward in place of the head's."""
        self._before = self._head.__dict__.get(self._place)
        setattr(self._head, self._place, types.MethodType(self._head_forward, self._head))

    def disarm(self) -> None:
        """Put the head's own forward back."""
        if self._before is None:
            self._head.__dict__.pop(self._place, None)
        else:
            setattr(self._head, self._place, self._before)

    def _head_forward(self, head: nn.Module, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        if self._pending is None:
            return LazyLogits(self, hidden, LogitTransform(vocabulary(head)), _logit_dtype(hidden))
        logits, request = self._pending
        transform, operands = logits.transform, head_operands(head, logits.hidden)
        bias_V = operands.bias_V
        if transform.bias_V is not None:
            extra_V = transform.bias_V.to(operands.weight_VD)
            bias_V = extra_V if bias_V is None else bias_V + extra_V
        if transform.softcap is not None and transform.softcap <= 0:
            logits.refuse("a tanh with a factor that is not positive")
        self.output = head_loss(
            operands.hidden,
            operands.weight_VD,
            request.target.to(operands.hidden.device),
            self._settings.objective,
            bias=bias_V,
            ignore_index=request.ignore_index,
            reduction=self.reduction,
            valid_vocab=None if transform.vocab == operands.weight_VD.shape[0] else transform.vocab,
            logit_scale=transform.logit_scale,
            softcap=transform.softcap,
            label_smoothing=request.label_smoothing or self._settings.label_smoothing,
            statistics=self._settings.statistics,
            backend=self._settings.backend,
        )
        return self.output.loss

    def loss(self, logits: LazyLogits, request: CrossEntropyRequest) -> Tensor:
        """What the model's `F.cross_entropy` returns."""
        self.losses += 1
        if self.losses > 1:
            raise UnsupportedModelError(
                f"{self.model_name} computes more than one cross-entropy from its output head in one training step "
                "(multi-token prediction?); which of them should carry Z cannot be told."
            )
        self._pending = (logits, request)
        check_reduction(request.reduction)
        self.reduction = "none" if self.per_token else cast(Reduction, request.reduction)
        try:
            loss: Tensor = self._head(logits.hidden)
        finally:
            self._pending = None
        return loss.sum() if self.per_token else loss


def _logit_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype that the head's own logits would have."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
