"""The hidden states that the output head of a language model receives.

u is the input of the output-embedding module, caught by a forward pre-hook, so scaling or normalisation in front of the
head needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zloss.errors import CheckpointError, ZlossError, first_line
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead

HiddenStates = Callable[[Tensor], Tensor]
"""Token ids [B, N] to hidden states [B, N, D]."""


class _HiddenCaptured(Exception):
    """Raised by the pre-hook to leave the forward pass before the model computes its own logits."""


@contextmanager
def hidden_states(checkpoint: Checkpoint, head: OutputHead) -> Iterator[HiddenStates]:
    """The hidden states of any token ids: the model's forward pass, ended before its head."""
    caught: list[Tensor] = []

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        caught.append(inputs[0])
        raise _HiddenCaptured

    handle = head.module.register_forward_pre_hook(hook)

    def run(ids_BN: Tensor) -> Tensor:
        caught.clear()
        try:
            checkpoint.model(input_ids=ids_BN, use_cache=False)
        except _HiddenCaptured:
            return caught.pop()
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AttributeError) as error:
            if isinstance(error, ZlossError) or "memory" in str(error).lower():
                raise
            raise CheckpointError(
                f"the forward pass of {checkpoint.name} fails ({type(error).__name__}: {first_line(error)}): its config and its "
                "weights do not belong together, or the model needs other inputs than token ids."
            ) from error
        raise CheckpointError(f"{checkpoint.name} never calls its output head in a forward pass: it cannot be audited.")

    try:
        yield run
    finally:
        handle.remove()
