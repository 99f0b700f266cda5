"""Small models, batches and the truth they are compared with: CE + Z of the model's own logits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.transformers.sweep import OBJECTIVE, cross_entropy_plus_z, relative_difference
from tests.integrations.transformers.tiny_configs import VOCAB, build_tiny, causal_classes

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"


def small(name: str = LLAMA) -> Any:
    """A small model of a class, in training mode, the same at every call."""
    return build_tiny(name, causal_classes()[name]).train()


def batch(seed: int = 1, sequences: int = 2, length: int = 16) -> dict[str, Tensor]:
    """Sequences with ignored labels at the start of the first."""
    ids = torch.randint(3, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True))


def truth(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of a model without `apply`, whose own cross-entropy has Z added."""
    with mock.patch.object(F, "cross_entropy", cross_entropy_plus_z):
        loss = model(**inputs).loss
    return loss.detach(), gradients(model, loss)


def assert_equals_truth(model: nn.Module, inputs: dict[str, Any], wanted: tuple[Tensor, list[Tensor | None]]) -> None:
    loss = model(**inputs).loss
    torch.testing.assert_close(loss.detach(), wanted[0], rtol=1e-5, atol=1e-6)
    assert relative_difference(gradients(model, loss), wanted[1]) <= 1e-4


__all__ = ["GPT2", "LLAMA", "OBJECTIVE", "VOCAB", "assert_equals_truth", "batch", "gradients", "small", "truth"]
