"""The output that TRL's SFTTrainer asks of a model: log-probabilities, entropy and accuracy per token instead of logits.

`log_probs` is −(CE + Z) of every token, so that the loss TRL makes of it is CE + Z; entropy, accuracy and mask are those
of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zloss.errors import MissingDependencyError, UnsupportedModelError
from zloss.integrations.transformers.training_call import TrainingCall


class NegativeLoss(Tensor):
    """−(CE + Z) of every token: a tensor whose exponential is refused, because it is not a probability."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in ("exp", "exp2", "expm1"):
            raise UnsupportedModelError(
                'the loss of a token was taken for its log-probability (TRL\'s loss_type="dft" does so), but it has Z in '
                'it: use loss_type="nll".'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def fused_output(call: TrainingCall, output: Any, given: dict[str, Any]) -> Any:
    """TRL's `FusedCausalLMOutput` for a call that asked for `fused_lm_head`."""
    try:
        from trl.trainer.utils import FusedCausalLMOutput
    except ImportError as error:
        raise MissingDependencyError("trl>=1.16", "Training with SFTTrainer", "trl") from error
    assert call.output is not None
    stats = call.output.stats
    if stats.entropy is None:
        raise UnsupportedModelError(
            "SFTTrainer logs the entropy of every token, which light statistics leave out: apply with statistics='full'."
        )
    shifted = given.get("shift_labels")

    def laid_out(values: Tensor) -> Tensor:
        """One value per predicted token, [B, T − 1], or [B, T] for labels that were shifted before."""
        if shifted is not None:
            return values.reshape(shifted.shape)
        batch, length = given["labels"].shape
        if values.numel() == batch * length:  # shifted by padding: the last place of every sequence is ignored
            return values.reshape(batch, length)[:, :-1]
        return values.reshape(batch, length - 1)

    return FusedCausalLMOutput(
        loss=None,
        log_probs=laid_out(-call.output.loss).as_subclass(NegativeLoss),
        entropy=laid_out(stats.entropy.masked_fill(~stats.valid, 0)),
        is_top1=laid_out(stats.top1 & stats.valid),
        label_mask=laid_out(stats.valid),
        aux_loss=getattr(output, "aux_loss", None),
    )
