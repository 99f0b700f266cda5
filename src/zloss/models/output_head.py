"""The output head of a language model: its weight and bias, and the scale and cap of its logits.

Scale and cap are read from the config; `head_check.py` compares the logits they give with the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError
from zloss.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class OutputHead:
    """z = logit_scale·(W u + b), then softcap·tanh(z/softcap) where there is a cap."""

    module: nn.Module
    weight_VD: Tensor
    bias_V: Tensor | None
    tied: bool
    """Whether the weight is also the table of the input embedding."""
    logit_scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def width(self) -> int:
        return self.weight_VD.shape[1]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """All logits by the formula, [T, V]."""
        z_TV = nn.functional.linear(hidden_TD, self.weight_VD, self.bias_V) * self.logit_scale
        return z_TV if self.softcap is None else self.softcap * torch.tanh(z_TV / self.softcap)


def find_head(checkpoint: Checkpoint) -> OutputHead:
    """The output head with its conventions, not yet checked against the model."""
    model: Any = checkpoint.model
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise CheckpointError(f"{checkpoint.name} has no output head: get_output_embeddings() gives no [V, D] weight.")
    embedding = model.get_input_embeddings()
    table = getattr(embedding, "weight", None)
    bias = getattr(module, "bias", None)
    config = checkpoint.config.get_text_config()
    return OutputHead(
        module=module,
        weight_VD=weight,
        bias_V=bias if isinstance(bias, Tensor) else None,
        tied=isinstance(table, Tensor) and table.data_ptr() == weight.data_ptr(),
        logit_scale=_logit_scale(config),
        softcap=_nonzero(config, "final_logit_softcapping"),
    )


def _nonzero(config: Any, key: str) -> float | None:
    """A number of the config; None where it is missing, None or 0."""
    value = getattr(config, key, None)
    return float(value) if value else None


def _logit_scale(config: Any) -> float:
    """Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, Falcon-H1 has `lm_head_multiplier`."""
    multiply = (_nonzero(config, "logit_scale") or 1.0) * (_nonzero(config, "lm_head_multiplier") or 1.0)
    return multiply / (_nonzero(config, "logits_scaling") or 1.0)
