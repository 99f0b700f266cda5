"""The hidden states, weight and bias whose product a head's logits are, adapters of PEFT included.

LoRA on the head joins as r more columns: W u + s·B A u = [W, s·B] [u; A u].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import UnsupportedModelError


@dataclass(frozen=True)
class HeadOperands:
    """z = W u + b."""

    hidden: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None


def output_head(model: Any) -> nn.Module:
    """The module whose forward multiplies by the head's weight, as it stands now: PEFT and FSDP may have replaced it."""
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise UnsupportedModelError(
            f"{name} names no output head (`get_output_embeddings()` returns None), so its logits cannot be taken over."
        )
    if type(head).__name__ == "ModulesToSaveWrapper":
        head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
    check_head(head, name)
    return head  # type: ignore[no-any-return]


def check_head(head: Any, model_name: str) -> None:
    """Refuse a head that is not one matrix product, with or without LoRA beside it."""
    base = getattr(head, "base_layer", None)
    if base is not None:
        if any(getattr(head, "use_dora", {}).values()) or getattr(head, "lora_variant", None):
            raise UnsupportedModelError(
                f"{model_name} has DoRA or another LoRA variant on its output head, whose logits are not one matrix product: "
                "leave the head out of `target_modules`, or use plain LoRA there."
            )
        if not hasattr(head, "lora_A"):
            raise UnsupportedModelError(
                f"{model_name} has a {type(head).__name__} on its output head; plain LoRA is what can be taken over."
            )
        check_head(base, model_name)
        return
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise UnsupportedModelError(
            f"the output head of {model_name} is a {type(head).__name__}, whose logits may be more than W u + b: "
            "an nn.Linear is what can be taken over."
        )


def vocabulary(head: Any) -> int:
    """V."""
    return int(getattr(head, "base_layer", head).out_features)


def head_operands(head: Any, hidden: Tensor) -> HeadOperands:
    """The operands of the head's own product for these hidden states."""
    base = getattr(head, "base_layer", None)
    if base is None:
        return HeadOperands(hidden, head.weight, head.bias)
    plain = head_operands(base, hidden)
    if head.disable_adapters or head.merged:
        return plain
    hiddens, weights = [plain.hidden], [plain.weight_VD]
    for name in head.active_adapters:
        if name in head.lora_A:
            down, up = head.lora_A[name], head.lora_B[name]
            narrow = down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
            hiddens.append(narrow.to(plain.hidden.dtype))
            weights.append((up.weight * head.scaling[name]).to(plain.weight_VD.dtype))
    if len(hiddens) == 1:
        return plain
    return HeadOperands(torch.cat(hiddens, dim=-1), torch.cat(weights, dim=-1), plain.bias_V)
