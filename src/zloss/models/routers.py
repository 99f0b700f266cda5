"""The routers of a Hugging Face model: where their logits come out, what their weight is, how they score.

Routers are the modules that a model lists under `_can_record_outputs["router_logits"]`, each counted once: a listed module that
contains another listed one only passes on that router's logits. The flag `output_router_logits`, which also enables a model's
load-balancing loss, is left as the user set it. This module does not import transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import DtypeError, InputError, ShapeError
from zloss.results.router import Scoring
from zloss.router.conventions import RouterContext
from zloss.tensors import check_mask


@dataclass(frozen=True)
class RouterModule:
    """One router, and which of its outputs is the logits."""

    name: str
    module: nn.Module
    output_index: int

    def logits(self, inputs: tuple[Any, ...], output: Any) -> Tensor:
        """The [T, E] logits in what the router returned for its inputs, batch and sequence flattened."""
        found = output[self.output_index] if isinstance(output, tuple) else output
        if not isinstance(found, Tensor):
            raise InputError(f"router {self.name!r} is expected to return its logits, but gave {type(found).__name__}.")
        hidden = next((value for value in inputs if isinstance(value, Tensor) and value.is_floating_point()), found)
        tokens = hidden.shape[:-1].numel()
        if found.shape[:-1].numel() != tokens:
            raise ShapeError(
                f"router {self.name!r} ({type(self.module).__name__}) is expected to return logits [tokens, experts] = "
                f"[{tokens}, experts], but gave {list(found.shape)}: a router Z-loss needs one softmax over the experts."
            )
        return found.flatten(0, -2)

    def weight(self, experts: int) -> Tensor | None:
        """W_R [E, D], if the router has exactly one parameter of that shape."""
        found = [p for p in self.module.parameters() if p.ndim == 2 and p.shape[0] == experts]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class ModelRouters:
    """All routers of a model in the order of its modules (an encoder's first), which need not be the order of its calls."""

    modules: tuple[RouterModule, ...]
    top_k: int | None
    model_layers: int | None
    encoder_layers: int | None
    scoring: Scoring

    @property
    def without_softmax(self) -> bool:
        """Whether each expert is scored by its own logit alone, so log Z_R normalizes nothing."""
        return self.scoring in ("sigmoid", "other")

    @property
    def context(self) -> RouterContext:
        """What a convention's scale may depend on."""
        return RouterContext(model_layers=self.model_layers, encoder_layers=self.encoder_layers)

    def require_top_k(self, top_k: int | None) -> int:
        """`top_k`, or the model's k if it is None."""
        found = self.top_k if top_k is None else top_k
        if found is None:
            raise InputError("the model does not say how many experts each token is routed to: pass `top_k`.")
        return found

    def masks(self, inputs: Mapping[str, Any], tokens: Sequence[int]) -> list[Tensor] | None:
        """The padding mask of every router from the model's attention masks; None if there are none."""
        whole, decoder = inputs.get("attention_mask"), inputs.get("decoder_attention_mask")
        if whole is None and (decoder is None or self.encoder_layers is None):
            return None
        for name, mask in (("attention_mask", whole), ("decoder_attention_mask", decoder)):
            if isinstance(mask, Tensor) and mask.ndim <= 2:
                check_mask(name, mask)
        masks = []
        for index, count in enumerate(tokens):
            in_decoder = self.encoder_layers is not None and index >= self.encoder_layers
            mask = decoder if in_decoder else whole
            if mask is None:
                masks.append(torch.ones(count, dtype=torch.bool))
                continue
            if not isinstance(mask, Tensor) or mask.numel() != count:
                shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise InputError(
                    f"the attention mask of router {self.modules[index].name!r} is expected to hold one entry for each "
                    f"of its {count} tokens, but got {shape}: pass a [batch, sequence] mask."
                )
            masks.append(mask.reshape(-1))
        return masks

    @contextmanager
    def capture(self) -> Iterator[list[Tensor]]:
        """The [T, E] logits of every router called inside the block, with their graph, in the order of `modules`.

        The list is filled when the block ends.
        """
        collected: list[Tensor] = []
        found: list[tuple[int, Tensor]] = []
        handles = self.watch(lambda place, logits: found.append((place, logits)))
        try:
            yield collected
        finally:
            for handle in handles:
                handle.remove()
            collected += [logits for _, logits in sorted(found, key=lambda pair: pair[0])]

    def watch(self, keep: Callable[[int, Tensor], None]) -> list[Any]:
        """Call `keep(index in modules, [T, E] logits)` whenever a router is called; returns the hooks to remove."""

        def hook(place: int, router: RouterModule) -> Any:
            return router.module.register_forward_hook(
                lambda _module, args, kwargs, output: keep(place, router.logits((*args, *kwargs.values()), output)),
                with_kwargs=True,
            )

        return [hook(place, router) for place, router in enumerate(self.modules)]

    def lost_normalizer(self, layers: Sequence[Tensor]) -> str | None:
        """Why log Z_R cannot be computed from the routers' outputs; None if they are logits.

        Gemma 4's router returns probabilities under the name of logits.
        """
        for router, layer in zip(self.modules, layers, strict=False):
            total_T = layer.detach().float().sum(dim=1)
            if layer.shape[1] > 1 and bool((layer >= 0).all()) and torch.allclose(total_T, torch.ones_like(total_T)):
                return (
                    f"router {router.name!r} ({type(router.module).__name__}) returns probabilities instead of logits, and log "
                    "Z_R cannot be recovered from them"
                )
        return None


def find_routers(model: nn.Module) -> ModelRouters:
    """The routers of a Hugging Face MoE model (Mixtral, OLMoE, Qwen-MoE, Switch, ...), or why there are none."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"`model` is expected to be a module, but got {type(model).__name__}.")
    modules = _router_modules(model)
    if not modules:
        raise InputError(
            f"{type(model).__name__} records no router logits: it is not a mixture-of-experts model, or not one that "
            "transformers can record. Pass the logits to `zloss.router_loss` yourself."
        )
    config = getattr(model, "config", None)
    # The encoder's first, whatever the order of its modules.
    modules.sort(key=lambda router: "encoder" not in router.name.split("."))
    in_encoder = sum("encoder" in router.name.split(".") for router in modules)
    two_stacks = bool(getattr(config, "is_encoder_decoder", False)) and 0 < in_encoder < len(modules)
    return ModelRouters(
        modules=tuple(modules),
        top_k=_top_k(modules[0].module, config),
        model_layers=_depth(config, len(modules)),
        encoder_layers=in_encoder if two_stacks else None,
        scoring=_scoring(modules[0].module, config),
    )


def _router_modules(model: nn.Module) -> list[RouterModule]:
    recorded: list[tuple[type[nn.Module], int]] = []
    for part in model.modules():
        specs = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for spec in specs if isinstance(specs, list) else [specs]:
            target = getattr(spec, "target_class", spec)
            if isinstance(target, type):
                recorded.append((target, getattr(spec, "index", 1)))
    found = []
    for name, module in model.named_modules():
        index = next((index for target, index in recorded if isinstance(module, target)), None)
        if index is not None:
            found.append(RouterModule(name, module, index))
    # JetMoe lists its attention and the gate inside it: one router, whose logits come out twice.
    listed = {id(router.module) for router in found}
    return [
        router
        for router in found
        if not any(id(part) in listed for part in router.module.modules() if part is not router.module)
    ]


def _top_k(router: nn.Module, config: Any) -> int | None:
    for holder in (router, config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)):
        for name in ("top_k", "num_experts_per_tok", "moe_top_k", "moe_k"):
            value = getattr(holder, name, None)
            if name == "top_k" and holder is config:
                continue  # on an old model config it is a setting of text generation
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 1 if "Top1" in type(router).__name__ else None


def _depth(config: Any, routers: int) -> int | None:
    depth = getattr(config, "num_hidden_layers", None) or getattr(config, "num_layers", None)
    if getattr(config, "is_encoder_decoder", False):
        depth = (getattr(config, "num_layers", 0) or 0) + (getattr(config, "num_decoder_layers", 0) or 0)
    return depth if isinstance(depth, int) and depth >= routers else None


def _scoring(router: nn.Module, config: Any) -> Scoring:
    """How logits become weights, from the config, or else from which of the two functions the router's code calls."""
    for holder in (config, getattr(config, "text_config", None)):
        for name in ("scoring_func", "score_func", "expert_selection_fn", "router_scoring_func"):
            value = getattr(holder, name, None)
            if isinstance(value, str):
                return "softmax" if "softmax" in value else "sigmoid" if "sigmoid" in value else "other"
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    # The names that the code uses: a comment such as "sigmoid instead of softmax" is not among them.
    names = () if code is None else code.co_names
    softmax, sigmoid = (any(function in name for name in names) for function in ("softmax", "sigmoid"))
    if softmax == sigmoid:
        return "unknown"
    return "softmax" if softmax else "sigmoid"
