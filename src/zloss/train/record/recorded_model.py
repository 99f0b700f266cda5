"""The model of another loop as the measurement needs it: its head, and hidden states of token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import HiddenStates, OutputHead, check_head, find_head, hidden_states
from zloss.text import Blocks


@dataclass(frozen=True)
class RecordedModel:
    """A model in training, bare of wrappers."""

    module: nn.Module
    head_module: nn.Module | None
    """The output head of a model that is not of transformers."""
    hidden_of: HiddenStates | None
    """Its function from token ids [B, N] to hidden states [B, N, D]."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """As a checkpoint; None for a model that is not of transformers."""
        if self.hidden_of is not None:
            return None
        return Checkpoint(type(self.module).__name__, "another loop", self.module, None, wants_bos=False)

    def refuse_shards(self) -> None:
        """An error where no process holds the whole model."""
        if any(type(parameter.data).__name__ == "DTensor" for parameter in self.module.parameters()):
            raise InputError(
                "the validation of a recorded run is measured by one process, but this model's parameters are sharded "
                "(FSDP2): record runs under DDP or in one process."
            )

    def head(self) -> OutputHead:
        """The output head as it is now."""
        checkpoint = self.checkpoint
        if checkpoint is not None:
            return find_head(checkpoint)
        weight, bias = getattr(self.head_module, "weight", None), getattr(self.head_module, "bias", None)
        if self.head_module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
            raise InputError("`head` is expected to be the output layer, a module with a weight [V, D].")
        return OutputHead(self.head_module, weight, bias if isinstance(bias, Tensor) else None, tied=False)

    @contextmanager
    def states(self) -> Iterator[HiddenStates]:
        """Hidden states of token ids, in evaluation mode; the mode comes back afterwards."""
        with self.evaluating():
            checkpoint = self.checkpoint
            if checkpoint is None:
                assert self.hidden_of is not None
                yield self.hidden_of
            else:
                with hidden_states(checkpoint, self.head()) as hidden_of:
                    yield hidden_of

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside the block; every submodule gets its own mode back."""
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    def check(self, blocks: Blocks) -> None:
        """Refuse a model whose validation would not be its own: before the first step, not after the last."""
        checkpoint, head = self.checkpoint, self.head()
        ids_BN = blocks.inputs(0, 1).to(head.weight_VD.device)
        if int(blocks.stream.max()) >= head.vocab:
            raise InputError(
                f"`validation` holds the token id {int(blocks.stream.max())}, but the head has {head.vocab} rows."
            )
        with self.evaluating():
            if checkpoint is not None:
                check_head(checkpoint, head, ids_BN[0])
                return
            assert self.hidden_of is not None
            shape = list(self.hidden_of(ids_BN).shape)
            if shape != [*ids_BN.shape, head.width]:
                raise InputError(
                    f"`hidden_of` is expected to give hidden states {[*ids_BN.shape, head.width]} of token ids "
                    f"{list(ids_BN.shape)}, but gave {shape}."
                )


def recorded_model(
    model: nn.Module, head: nn.Module | None, hidden_of: Callable[[Tensor], Tensor] | None
) -> RecordedModel:
    """The model without its wrappers; one of transformers needs neither `head` nor `hidden_of`."""
    inner = unwrapped(model)
    if (head is None) != (hidden_of is None):
        raise InputError("`head` and `hidden_of` belong together: pass both, or none for a model of transformers.")
    if hidden_of is None and not (hasattr(inner, "get_output_embeddings") and hasattr(inner, "config")):
        raise InputError(
            f"{type(inner).__name__} is not a model of transformers: pass `head`, its output layer, and `hidden_of`, a "
            "function from token ids [B, N] to hidden states [B, N, D]."
        )
    found = RecordedModel(inner, head, hidden_of)
    found.refuse_shards()
    return found


def unwrapped(model: Any) -> Any:
    """The model inside torch.compile, DDP and PEFT."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ == "DistributedDataParallel":
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model
