"""What `apply` returns: the hooks on a model, and the output of its last training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from zloss.errors import UnsupportedModelError
from zloss.head.compiling import outside_compile
from zloss.head.loss import HeadLossOutput
from zloss.integrations.call_arguments import given_arguments
from zloss.integrations.moe import RouterLossHandle
from zloss.integrations.transformers.lazy_logits import LazyLogits
from zloss.integrations.transformers.settings import Settings
from zloss.integrations.transformers.training_call import TrainingCall
from zloss.telemetry.micro_batch import MicroBatch, micro_batch

LABELS = ("labels", "shift_labels")


class ZLossHandle:
    """A model whose training loss goes through `head_loss`; `remove()` takes everything back.

    `last` is the output of the last training forward: CE and Z apart and the statistics of every token, detached.
    `calls` counts those forwards, and every function in `observers` is called with each. `router` is the handle of the
    router Z-loss, or None. The handle is a context manager. A copy or a pickle of the model carries a handle of
    its own, without `last` and observers.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self.last: HeadLossOutput | None = None
        self.calls = 0
        self.observers: list[Callable[[MicroBatch], None]] = []
        self.router: RouterLossHandle | None = None
        self._model = model
        self._open: list[TrainingCall | None] = []
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self.router is not None:
            self.router.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # `last` belongs to the original's last step; its tensors are not leaves, which torch refuses to copy.
        return self.__dict__ | {"last": None, "_open": [], "observers": []}

    @outside_compile
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_arguments(model, args, kwargs)
        has_labels = any(given.get(name) is not None for name in LABELS)
        if not (model.training and torch.is_grad_enabled() and has_labels):
            self._open.append(None)
            return None
        per_token = bool(kwargs.get("fused_lm_head"))
        if per_token:
            kwargs = {name: value for name, value in kwargs.items() if name != "fused_lm_head"}
        call = TrainingCall(model, self.settings, per_token=per_token)
        call.arm()
        self._open.append(call)
        return args, kwargs

    @outside_compile
    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = self._open.pop() if self._open else None
        if call is None:
            if output is not None and torch.is_grad_enabled():
                forbid_backward(model, output, given_arguments(model, args, kwargs))
            return None
        call.disarm()
        if output is None:  # the forward raised; its exception goes on from here
            return None
        if call.output is None:
            raise UnsupportedModelError(
                f"{call.model_name} computed its training loss without its output head or without `F.cross_entropy` "
                "(another patch of its forward, such as Liger's fused cross-entropy?), so Z could not be added."
            )
        self.calls += 1
        self.last = replace(call.output, loss=call.output.loss.detach())
        for observe in self.observers:
            observe(micro_batch(self.last, call.reduction))
        if call.per_token:
            if self.router is not None:
                raise UnsupportedModelError(
                    "SFTTrainer makes its loss from the log-probabilities of tokens, which have no place for a router "
                    "Z-loss: apply without `router`, or use the Trainer of transformers."
                )
            from zloss.integrations.transformers.trl_output import fused_output

            return fused_output(call, output, given_arguments(model, args, kwargs))
        return without_logits(output)


def forbid_backward(model: nn.Module, output: Any, given: dict[str, Any]) -> None:
    """A loss that did not go through us may be looked at, but a backward pass from it would train without Z."""
    name = type(model).__name__
    has_labels = any(given.get(label) is not None for label in LABELS)
    if has_labels:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        why = (
            f"{name} is in evaluation mode, so its loss has no Z: call model.train() before training "
            "(Lightning leaves models from `from_pretrained` in evaluation mode)."
        )
    elif model.training:
        tensor = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        why = (
            f"{name} was called in training mode without `labels`, so the loss was computed outside the model and has no Z. "
            "A label smoother or `compute_loss_func` of a Trainer takes the labels away: pass `label_smoothing` to zloss "
            "instead, or compute the loss with zloss.logits_loss."
        )
    else:
        return

    def refuse(_grad: Tensor) -> None:
        raise UnsupportedModelError(why)

    if isinstance(tensor, Tensor) and tensor.requires_grad:
        tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def without_logits(output: Any) -> Any:
    """The model's output with no entry where lazy logits stood."""
    if isinstance(output, tuple) and not hasattr(output, "keys"):
        return tuple(None if isinstance(value, LazyLogits) else value for value in output)
    return type(output)(**{name: value for name, value in output.items() if not isinstance(value, LazyLogits)})
