"""The output head of a language model: its weight, bias, logit scale and softcap, the hidden states it receives, and a check that
it reproduces the logits of the model.

Scale and softcap are read from the config. An architecture may do something to its logits that `find_head` does not handle, and
every number of an audit would be wrong; `check_head` compares the logits with the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import CheckpointError, InputError, ZlossError, first_line
from zloss.models.checkpoint import Checkpoint, CustomHead, present_tensor, stored_name


@dataclass(frozen=True)
class OutputHead:
    """z = logit_scale·(W u + b), then softcap·tanh(z/softcap) if there is a cap."""

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
    """The output head with its scale and softcap, not yet checked against the model."""
    if checkpoint.custom is not None:
        return _custom_head(checkpoint.model, checkpoint.custom)
    model: Any = checkpoint.model
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise CheckpointError(f"{checkpoint.name} has no output head: get_output_embeddings() gives no [V, D] weight.")
    embedding = model.get_input_embeddings()
    table = getattr(embedding, "weight", None)
    tied = isinstance(table, Tensor) and table.data_ptr() == weight.data_ptr()
    bias = getattr(module, "bias", None)
    if weight.is_meta:  # offloaded: the head is read for every chunk, so it is kept in memory
        names = {id(each): f"{name}.weight" for name, each in model.named_modules()}
        tied = stored_name(model, names[id(module)]) == stored_name(model, names[id(embedding)])
        weight = present_tensor(module, "weight")
        bias = present_tensor(module, "bias") if isinstance(bias, Tensor) else None
    config = checkpoint.config.get_text_config()

    def number(key: str) -> float | None:
        """A number of the config; None if it is missing, None or 0."""
        value = getattr(config, key, None)
        return float(value) if value else None

    # Cohere multiplies by `logit_scale`, Falcon-H1 by `lm_head_multiplier`; Granite divides by `logits_scaling`.
    multiply = (number("logit_scale") or 1.0) * (number("lm_head_multiplier") or 1.0)
    return OutputHead(
        module=module,
        weight_VD=weight,
        bias_V=bias if isinstance(bias, Tensor) else None,
        tied=tied,
        logit_scale=multiply / (number("logits_scaling") or 1.0),
        softcap=number("final_logit_softcapping"),
    )


def _custom_head(model: nn.Module, custom: CustomHead) -> OutputHead:
    """The head as it is now; tied if an embedding of the model has the same weight."""
    weight, bias = getattr(custom.module, "weight", None), getattr(custom.module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        found = f"has a weight {list(weight.shape)}" if isinstance(weight, Tensor) else "has none"
        raise InputError(
            f"`head` is expected to be the output layer, a module with a weight [V, D], but {type(custom.module).__name__} "
            f"{found}."
        )
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    tied = any(table.data_ptr() == weight.data_ptr() and table.shape == weight.shape for table in tables)
    bias = bias if isinstance(bias, Tensor) else None
    return OutputHead(custom.module, weight, bias, tied, custom.logit_scale, custom.softcap)


HiddenStates = Callable[[Tensor], Tensor]
"""Token ids [B, N] to hidden states [B, N, D]."""


class _HiddenCaptured(Exception):
    """Raised by the pre-hook to leave the forward pass before the model computes its logits."""


@contextmanager
def hidden_states(checkpoint: Checkpoint, head: OutputHead) -> Iterator[HiddenStates]:
    """Hidden states of token ids: the forward pass of the model, stopped before its head.

    They are the input of the output-embedding module, caught by a forward pre-hook, so scaling or normalization before the head
    needs no special case. For a model that is not from transformers, they are what its `hidden_of` returns.
    """
    if checkpoint.custom is not None:
        yield checkpoint.custom.hidden_of
        return
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
                "weights do not match, or the model needs inputs other than token ids."
            ) from error
        raise CheckpointError(f"{checkpoint.name} never calls its output head in a forward pass: it cannot be audited.")

    try:
        yield run
    finally:
        handle.remove()


@contextmanager
def all_parameters_on(model: nn.Module) -> Iterator[None]:
    """Inside, every floating parameter requires a gradient, as in training; afterwards every parameter has its flag back."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def has_graph(checkpoint: Checkpoint, head: OutputHead, ids_N: Tensor) -> bool:
    """Whether a backward pass can start at the hidden states; not if `hidden_of` detaches them or computes without gradients."""
    ids_BN = ids_N.unsqueeze(0).to(head.weight_VD.device)
    with all_parameters_on(checkpoint.model), torch.enable_grad(), hidden_states(checkpoint, head) as hidden_of:
        return hidden_of(ids_BN).requires_grad


CHECK_TOKENS = 64
"""Tokens compared; few, because the model computes all their logits at once (V can be 262,144)."""
AGREEMENT = 1e-3
"""Largest relative difference between our logits and the model's."""
FORESIGHT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative change of earlier hidden states when a later token changes: what rounding explains."""


@torch.no_grad()
def check_head(checkpoint: Checkpoint, head: OutputHead, ids_N: Tensor) -> float | None:
    """The relative difference between our logits and the model's; a `CheckpointError` if it is too large.

    Also an error if the model is not causal, that is, if changing the last token changes the hidden states before it.
    None for a model that gives no logits to compare with: not from transformers, with a table as its head.
    """
    custom = checkpoint.custom
    ids_BN = ids_N[:CHECK_TOKENS].unsqueeze(0).to(head.weight_VD.device)
    with hidden_states(checkpoint, head) as hidden_of:
        try:
            hidden = hidden_of(ids_BN)
        except (IndexError, RuntimeError) as error:
            if custom is not None:
                raise  # the caller's function, with its traceback
            raise CheckpointError(f"the forward pass of {checkpoint.name} fails: {first_line(error)}.") from error
        expected_shape = [*ids_BN.shape, head.width]
        if custom is not None and list(getattr(hidden, "shape", ())) != expected_shape:
            found = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise InputError(
                f"`hidden_of` is expected to give hidden states {expected_shape} of token ids {list(ids_BN.shape)}, but gave "
                f"{found}."
            )
        changed = ids_BN.clone()
        changed[0, -1] = (changed[0, -1] + 1) % head.vocab
        future = hidden_of(changed)
    if ids_BN.shape[1] > 1 and _relative(future[0, :-1], hidden[0, :-1]) > FORESIGHT[hidden.dtype]:
        raise CheckpointError(
            f"{checkpoint.name} is not causal: changing a token changes the hidden states before it. "
            "An audit needs a causal language model, not an encoder."
        )
    if custom is not None:
        return _check_custom_logits(checkpoint, custom, head, ids_BN, hidden)
    try:
        expected = checkpoint.model(input_ids=ids_BN, use_cache=False).logits
    except Exception as error:
        raise CheckpointError(f"the forward pass of {checkpoint.name} fails: {first_line(error)}.") from error
    difference = _relative(head.logits(hidden), expected)
    _refuse_nan(checkpoint, difference)
    if not difference <= AGREEMENT:
        raise CheckpointError(
            f"the logits of {checkpoint.name} are not reproduced by its output head: relative difference {difference:.2g} "
            f"(limit {AGREEMENT:g}) with logit scale {head.logit_scale:g} and softcap {head.softcap}. "
            f"Its architecture ({type(checkpoint.model).__name__}) changes the logits in a way that zloss does not support."
        )
    return difference


def _check_custom_logits(
    checkpoint: Checkpoint, custom: CustomHead, head: OutputHead, ids_BN: Tensor, hidden_BND: Tensor
) -> float | None:
    """The same for a model that is not from transformers: against what the model itself returns for token ids, if those are
    logits (or log-probabilities) of every position, else against what the head returns for the hidden states."""
    ours, shape = head.logits(hidden_BND), (*ids_BN.shape, head.vocab)
    try:
        own: Any = checkpoint.model(ids_BN)
    except Exception:  # it takes other arguments
        own = None
    own = getattr(own, "logits", own)
    own = own[0] if isinstance(own, tuple) and own else own
    if not isinstance(own, Tensor) or own.shape != shape:
        if isinstance(custom.module, nn.Embedding):
            return None
        own, ours = custom.module(hidden_BND), replace(head, logit_scale=1.0, softcap=None).logits(hidden_BND)
    difference = min(_relative(ours, own), _relative(ours.double().log_softmax(-1), own))
    _refuse_nan(checkpoint, difference)
    if not difference <= AGREEMENT:
        raise CheckpointError(
            f"`head` and `hidden_of` do not reproduce the logits of {checkpoint.name}: relative difference {difference:.2g} "
            f"(limit {AGREEMENT:g}). Pass the hidden states that the head receives, after the last norm, and `logit_scale` or "
            "`softcap` if the model scales or caps its logits after the head."
        )
    return difference


def _refuse_nan(checkpoint: Checkpoint, difference: float) -> None:
    """An error if the logits are not finite: it names the weights that are not."""
    if not math.isnan(difference):
        return
    present = {name: weight for name, weight in checkpoint.model.named_parameters() if not weight.is_meta}
    # A bias of -inf is allowed, so NaN comes first.
    bad = [name for name, weight in present.items() if weight.isnan().any()]
    bad = bad or [name for name, weight in present.items() if weight.isinf().any()]
    if bad:
        raise CheckpointError(
            f"the logits of {checkpoint.name} are NaN, because {len(bad)} of its {len(present)} weights hold NaN or infinite "
            f"values ({bad[0]} is the first): use another checkpoint."
        )
    raise CheckpointError(
        f"the logits of {checkpoint.name} are NaN, although its weights are finite: an activation overflows. Check its config."
    )


def _relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖. Equal infinities agree: a bias of -inf switches a class off."""
    got, want = got.double(), want.double()
    difference = torch.where(got == want, 0.0, got - want).norm()
    return float(difference / torch.where(want.isinf(), 0.0, want).norm().clamp_min(torch.finfo(torch.float64).tiny))
