"""Each router convention written out as the loop its codebase runs, in plain differentiable operations.

Nothing here knows of α or s_rel: the reductions gather replicas, count routes, loop over layers and divide as they go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """What a literal reduction may look at."""

    layers: Sequence[Tensor]
    """[T, E] router logits per layer."""
    coef: float
    top_k: int
    target: float
    model_layers: int
    encoder_layers: int
    labelled: int
    """Tokens with a label, of T."""
    micro_batches: int


def violation(layer: Tensor, target: float) -> Tensor:
    return (torch.log(torch.exp(layer).sum(dim=1)) - target) ** 2


def token_layer_mean(case: Case) -> Tensor:
    return case.coef * torch.cat([violation(layer, case.target) for layer in case.layers]).mean()


def active_route_mean(case: Case) -> Tensor:
    """One violation per decision over the active routes, counted from the top-k selection."""
    total, routes = torch.zeros((), dtype=torch.float64), 0
    for layer in case.layers:
        total = total + violation(layer, case.target).sum()
        chosen = torch.zeros_like(layer, dtype=torch.bool)
        chosen.scatter_(1, layer.topk(case.top_k, dim=1).indices, True)
        routes += int(chosen.sum())
    return case.coef * total / routes


def active_route_sum(case: Case) -> Tensor:
    """k gathered replicas of each decision's violation, one per active route."""
    total, decisions = torch.zeros((), dtype=torch.float64), 0
    for layer in case.layers:
        owner = torch.arange(layer.shape[0]).repeat_interleave(case.top_k)
        total = total + violation(layer, case.target)[owner].sum()
        decisions += layer.shape[0]
    return case.coef * total / decisions


def layer_sum(case: Case) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for layer in case.layers:
        loss = loss + case.coef * violation(layer, case.target).mean()
    return loss


def layer_mean(case: Case) -> Tensor:
    found = [violation(layer, case.target).mean() for layer in case.layers]
    return case.coef * torch.stack(found).mean()


class SideChannel(torch.autograd.Function):
    """Passes logits through and injects the gradient of an auxiliary loss on the way back."""

    scale = 1.0

    @staticmethod
    def forward(ctx, logits, auxiliary):
        ctx.save_for_backward(auxiliary)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, grad):
        (auxiliary,) = ctx.saved_tensors
        return grad, torch.full_like(auxiliary, SideChannel.scale)


def side_channel(case: Case, scale: float) -> Tensor:
    """Per-layer scalers: the scalar returned is 0, only its gradient is the loss's."""
    SideChannel.scale = scale
    passed = [SideChannel.apply(layer, case.coef * violation(layer, case.target).mean()) for layer in case.layers]
    return sum((0.0 * layer.sum() for layer in passed), start=torch.zeros((), dtype=torch.float64))


def olmo_core(case: Case) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for layer in case.layers:
        loss = loss + case.coef * violation(layer, case.target).sum() / case.labelled / case.model_layers
    return loss


def olmoe(case: Case) -> Tensor:
    found = [violation(layer, case.target).sum() / (layer.shape[0] * case.top_k) for layer in case.layers]
    return case.coef * sum(found) / len(found)


def lm_engine(case: Case) -> Tensor:
    return sum((case.coef * 0.1 * violation(layer, case.target).mean() for layer in case.layers), start=torch.zeros(()))


def hf_switch(case: Case) -> Tensor:
    stacks = (case.layers[: case.encoder_layers], case.layers[case.encoder_layers :])
    means = [violation(torch.cat(list(stack)), case.target).mean() for stack in stacks]
    return case.coef * (means[0] + means[1])


def nothing(case: Case) -> Tensor:
    return sum((0.0 * layer.sum() for layer in case.layers), start=torch.zeros((), dtype=torch.float64))


LITERAL: dict[str, Callable[[Case], Tensor]] = {
    "token_layer_mean": token_layer_mean,
    "active_route_mean": active_route_mean,
    "active_route_sum": active_route_sum,
    "megatron": lambda case: side_channel(case, 1.0),
    "megatron_unscaled": lambda case: side_channel(case, float(case.micro_batches)),
    "mesh_tf": layer_sum,
    "st_moe_pytorch": layer_sum,
    "levanter": layer_sum,
    "xtuner": layer_sum,
    "kempnerforge": layer_sum,
    "olmo_core": olmo_core,
    "olmoe": olmoe,
    "flaxformer": layer_mean,
    "openmoe": layer_mean,
    "marin_grug": layer_mean,
    "megablocks_mean": layer_mean,
    "megablocks_sum": layer_sum,
    "lm_engine": lm_engine,
    "hf_switch": hf_switch,
    "hf_nllb_moe": nothing,
}
"""megatron_unscaled: the main loss is averaged over micro-batches, so a scaler left at 1 weighs M times too much."""
