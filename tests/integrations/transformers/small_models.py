"""Small models, batches and the truth they are compared with: CE + Z of the model's own logits."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zloss
from tests.integrations.transformers.tiny_configs import VOCAB, build_tiny, causal_classes
from zloss.integrations.transformers import apply

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
OBJECTIVE = zloss.StandardZLoss(1e-2, target=0.0)


def small(name: str = LLAMA) -> Any:
    """A small model of a class, in training mode, the same at every call."""
    return build_tiny(name, causal_classes()[name]).train()


def batch(seed: int = 1, sequences: int = 2, length: int = 16) -> dict[str, Tensor]:
    """Sequences with ignored labels at the start of the first."""
    ids = torch.randint(3, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def cross_entropy_plus_z(logits: Tensor, target: Tensor, *_args: Any, **options: Any) -> Tensor:
    """The truth: CE + Z of the logits that the model hands to its loss."""
    chosen = {name: options[name] for name in ("ignore_index", "reduction", "label_smoothing") if name in options}
    return zloss.logits_loss(logits, target, OBJECTIVE, **chosen).loss


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(0)
    loss: Tensor = model(**inputs).loss
    return loss


def loss_and_gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
    loss = loss_of(model, inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), list(torch.autograd.grad(loss, trained, allow_unused=True))


def truth(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of a model without `apply`, whose own cross-entropy has Z added."""
    with mock.patch.object(F, "cross_entropy", cross_entropy_plus_z):
        return loss_and_gradients(model, inputs)


def relative_difference(got: Any, wanted: Any) -> float:
    """‖got − wanted‖ / ‖wanted‖ over all parameters; infinite where one side has a gradient and the other has not."""
    if any((a is None) != (b is None) for a, b in zip(got, wanted, strict=True)):
        return math.inf
    pairs = [(a.double(), b.double()) for a, b in zip(got, wanted, strict=True) if a is not None]
    gap = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return gap / math.sqrt(sum(float(b.square().sum()) for _, b in pairs))


def assert_equals_truth(model: nn.Module, inputs: dict[str, Any], wanted: tuple[Tensor, list[Tensor | None]]) -> None:
    loss, gradients = loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss, wanted[0], rtol=1e-5, atol=1e-6)
    assert relative_difference(gradients, wanted[1]) <= 1e-4


def assert_exact(model: nn.Module, inputs: dict[str, Any] | None = None) -> None:
    """Under `apply` loss and gradients of a model are those of its own logits."""
    inputs = batch() if inputs is None else inputs
    wanted = truth(model, inputs)
    with apply(model, OBJECTIVE):
        assert_equals_truth(model, inputs, wanted)
