"""Add the router Z-loss to a Hugging Face mixture-of-experts model.

The logits are read from the routers themselves. `output_router_logits` and `router_aux_loss_coef`, the model's
load-balancing term, are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from zloss.errors import DtypeError, InputError
from zloss.models.routers import find_routers
from zloss.objectives import check_target
from zloss.router.conventions import RouterConvention, check_count, exact_coefficient, find_convention
from zloss.router.loss import RouterLoss, router_loss


def attach_router_loss(
    model: nn.Module,
    *,
    coef: float | None,
    convention: str | RouterConvention,
    target: float | None = None,
    top_k: int | None = None,
    capacity: int | None = None,
    micro_batches: int = 1,
) -> RouterLossHandle:
    """From now on `model(...).loss` includes λ_R Σ α (log Z_R − c_R)² in training mode; `handle.last` is the record.

    `model`: Mixtral, OLMoE, Qwen-MoE, Switch and others whose router logits transformers can record. An
    `attention_mask` excludes padding. `micro_batches`: divide by it in a loop that adds up losses which are already
    divided by the tokens of the whole step: the number of micro-batches, times the number of processes if the loop
    multiplies its loss by that. Hugging Face's Trainer does both by default; use `attach(trainer, ..., router=...)`
    there, which follows its settings.
    """
    return RouterLossHandle(model, RouterZLoss(convention, coef, target, top_k, capacity), micro_batches)


@dataclass(frozen=True)
class RouterZLoss:
    """A router Z-loss for `apply(model, objective, router=...)`: λ_R Σ α (log Z_R − c_R)².

    `convention` chooses α by name; `target` None is log E; `top_k` and `capacity` None are those of the model.
    """

    convention: str | RouterConvention = "token_layer_mean"
    coef: float | None = 1e-3
    target: float | None = None
    top_k: int | None = None
    capacity: int | None = None


class HookHandle:
    """Hooks on a model and replaced attributes until `remove()`; also a context manager."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, holder: Any, name: str, new: Any) -> Any:
        """Replace `holder.name`; returns what it was."""
        original = getattr(holder, name)
        self._replaced.append((holder, name, vars(holder).get(name)))
        setattr(holder, name, new)
        return original

    @classmethod
    def on(cls, model: nn.Module) -> bool:
        """Whether a handle of this class has hooks on the model."""
        return any(isinstance(getattr(hook, "__self__", None), cls) for hook in model._forward_hooks.values())

    def remove(self) -> None:
        """Remove the hooks and restore the attributes."""
        for hook in self._hooks:
            hook.remove()
        for holder, name, before in self._replaced:
            vars(holder).pop(name, None)  # somebody else may have removed it already
            if before is not None:  # an attribute of the instance, not of its class
                setattr(holder, name, before)
        self._hooks.clear()
        self._replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()


class RouterLossHandle(HookHandle):
    """A router Z-loss attached to a model: `last` is the record of the latest forward pass with a loss.

    In training mode the model's loss includes `last.loss` / `micro_batches`, or the share below; in evaluation mode the
    loss is unchanged and only `last` is set. Remove with `remove()`, or use it as a context manager.

    `step_tokens`: the tokens of all micro-batches and processes of the current optimizer step, divided by whatever the
    trainer divides the sum of their losses by; None if that is unknown. A forward pass with n tokens then adds
    `last.loss`·n / `step_tokens`, so that the step trains the mean over all its tokens however they are split.
    """

    def __init__(self, model: nn.Module, settings: RouterZLoss, micro_batches: int) -> None:
        if not isinstance(settings, RouterZLoss):
            raise DtypeError(f"`router` is expected to be a RouterZLoss, but got {type(settings).__name__}.")
        exact_coefficient(settings.coef)
        check_target("target", settings.target)
        check_count("top_k", settings.top_k, optional=True)
        check_count("capacity", settings.capacity, optional=True)
        check_count("micro_batches", micro_batches)
        self.routers = find_routers(model)
        if self.on(model):
            raise InputError(
                f"this {type(model).__name__} already has a router Z-loss: call `remove()` on the earlier handle first."
            )
        self.settings = settings
        self.convention = find_convention(settings.convention)
        if self.routers.without_softmax:
            function = "a sigmoid" if self.routers.scoring == "sigmoid" else "a function"
            raise InputError(
                f"{type(model).__name__} scores each expert with {function} of its own logit: there is no softmax normalizer "
                "for a router Z-loss to act on."
            )
        self.top_k = self.routers.require_top_k(settings.top_k)
        self.micro_batches = micro_batches
        self.step_tokens: Tensor | None = None
        self.last: RouterLoss | None = None
        self._calls: list[tuple[int, Tensor]] = []
        super().__init__()
        self._hooks += [
            model.register_forward_pre_hook(self._begin),
            *self.routers.watch(self._keep),
            model.register_forward_hook(self._end, with_kwargs=True),
        ]

    def routed_tokens(self, batch: Mapping[str, Any]) -> float:
        """Tokens of a batch that each router will see, without padding; the mean over routers in an encoder-decoder."""
        tokens, encoder = _tokens(batch, ""), self.routers.encoder_layers
        if encoder is None:
            return float(tokens)
        routers = len(self.routers.modules)
        return (encoder * tokens + (routers - encoder) * _tokens(batch, "decoder_")) / routers

    def _begin(self, _model: nn.Module, _inputs: Any) -> None:
        self._calls.clear()

    def _keep(self, position: int, logits: Tensor) -> None:
        self._calls.append((position, logits))

    def _end(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        calls, self._calls = self._calls, []
        layers = [logits for _, logits in sorted(calls, key=lambda call: call[0])]
        given = named_arguments(model, args, kwargs)
        as_tuple = isinstance(output, tuple)
        loss = (output[0] if given.get("labels") is not None else None) if as_tuple else getattr(output, "loss", None)
        if loss is None:  # generation or feature extraction
            return None
        if self.last is None:
            lost = self.routers.lost_normalizer(layers)
            if lost is not None:
                raise InputError(f"{lost}: compute its logits and pass them to `zloss.router_loss`.")
        if model.training and torch.is_grad_enabled() and not any(layer.requires_grad for layer in layers):
            raise InputError(
                "the router logits carry no gradient in training mode: routers are frozen, or reentrant gradient "
                "checkpointing hides them (use `use_reentrant=False`)."
            )
        self.last = router_loss(
            layers,
            coef=self.settings.coef,
            convention=self.convention,
            top_k=self.top_k,
            target=self.settings.target,
            mask=self.routers.masks(given, [layer.shape[0] for layer in layers]),
            capacity=self.settings.capacity,
            context=self.routers.context,
        )
        if not model.training:
            return None
        if self.step_tokens is None:
            term = self.last.loss / self.micro_batches
        else:
            tokens = self.last.stats.decisions_per_layer.mean()
            term = self.last.loss * (tokens / self.step_tokens.to(tokens)).to(self.last.loss)
        total = loss + term.to(loss)
        if as_tuple:
            return (total, *output[1:])
        output.loss = total
        return output


def _tokens(batch: Mapping[str, Any], stack: str) -> int:
    """Tokens of the encoder or decoder ("decoder_") stack of a batch, by its mask, else by its inputs."""
    mask = batch.get(f"{stack}attention_mask")
    if mask is not None:
        return int(mask.bool().sum())
    # A decoder without inputs reads the labels, shifted.
    for name in (f"{stack}input_ids", f"{stack}inputs_embeds", *(("labels",) if stack else ())):
        if batch.get(name) is not None:
            return int(batch[name].shape[:2].numel())
    raise InputError(
        f"a router Z-loss needs the number of tokens in every batch, but got a batch of {', '.join(batch)}: "
        f"include `{stack}input_ids` or `{stack}attention_mask`."
    )


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `model` by name; a hook gets positional ones without their names."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs
