"""A model that is in memory already, as a checkpoint: without its wrappers, in evaluation mode while it is measured.

A causal language model of transformers needs nothing else. Any other module comes with its output layer, `head`, and a function
`hidden_of` from token ids [B, N] to the hidden states [B, N, D] that the head receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zloss.distributed import is_dtensor
from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint, CustomHead, tokenizer_adds_bos


def checkpoint_in_memory(
    model: nn.Module,
    *,
    head: nn.Module | None = None,
    hidden_of: Callable[[Tensor], Tensor] | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tokenizer: Any = None,
    name: str | None = None,
) -> Checkpoint:
    """The model inside its wrappers, with its tokenizer if there is one; `name` defaults to that of its folder or class."""
    module = unwrapped(model)
    kind = type(module).__name__
    refuse_shards(module)
    custom = None
    if (head is None) != (hidden_of is None):
        raise InputError("`head` and `hidden_of` belong together: pass both, or neither for a transformers model.")
    if head is not None and hidden_of is not None:
        custom = CustomHead(head, hidden_of, logit_scale, softcap)
    elif not (hasattr(module, "get_output_embeddings") and hasattr(module, "config")):
        raise InputError(
            f"{kind} is not a transformers model: pass `head`, its output layer, and `hidden_of`, a function from "
            "token ids [B, N] to hidden states [B, N, D]."
        )
    elif (logit_scale, softcap) != (1.0, None):
        raise InputError(
            "`logit_scale` and `softcap` belong to `head`: for a transformers model they are read from its config."
        )
    if name is None:
        name = (None if custom is not None else getattr(module.config, "_name_or_path", None)) or kind
    wants_bos = tokenizer is not None and tokenizer_adds_bos(tokenizer)
    return Checkpoint(name, "memory", module, tokenizer, wants_bos, custom=custom)


def unwrapped(model: Any, check: Callable[[Any], None] = lambda wrapper: None) -> Any:
    """The model inside torch.compile, DDP and PEFT; `check` is called with it and with every wrapper."""
    while True:
        check(model)
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif type(model).__name__ == "DistributedDataParallel":
            model = model.module
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def refuse_shards(module: nn.Module) -> None:
    """Reject a model that no process holds as a whole."""
    if any(map(is_dtensor, module.parameters())):
        raise InputError(
            "the model is measured by one process, but its parameters are sharded (FSDP2): use DDP or one process, or gather "
            "the full weights first."
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; the mode of every submodule is restored."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
