"""Update audit: does a wrong source reach the parameters, and Adam?

The reference source (fp64 statistics of the fp32 logits) and the source of the same logits stored in 16 bits go through
one model graph, and the resulting parameter gradients are compared. For a tied head the head's gradient holds both paths.

    Δ_θ = ‖ĝ − g‖_F / ‖g‖_F   (paper eq:backward_deltas),   the same for the first Adam direction g/(|g| + 1e-8)

Gradients are mean-reduced over all predictions of the batch. Axes: T tokens of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zloss.audit.implementation.kernels import TINY, truth_of
from zloss.audit.implementation.source import Storage, storage_dtype
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, hidden_states
from zloss.optimizer.recorder import first_direction
from zloss.results.implementation_audit import UpdateErrors
from zloss.text import Blocks

Part = Literal["total", "z"]
Scope = Literal["head", "all"]
PARTS: tuple[Part, ...] = ("total", "z")
SCOPES: tuple[Scope, ...] = ("head", "all")
REFERENCE = "reference"


def update_audit(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    *,
    storages: Sequence[Storage] = ("bf16", "fp16"),
    logit_scales: Sequence[float] = (1, 4),
    coef: float = 1e-4,
    target: float,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[UpdateLine, ...]:
    """One line per storage, multiplier, part and scope; `advance` receives the tokens of each block and multiplier."""
    lines: list[UpdateLine] = []
    with trainable(checkpoint.model) as parameters:
        head_data = {tensor.data_ptr() for tensor in (head.weight_VD, head.bias_V) if tensor is not None}
        of_head = [parameter.data_ptr() in head_data for parameter in parameters]
        for scale in logit_scales:
            found: dict[tuple[str, Part, Scope], tuple[float, ...]] = {}
            # One part at a time, because each storage needs a copy of the model's gradients.
            for part in PARTS:
                last = advance if part == PARTS[-1] else lambda tokens: None
                grads = _gradients(checkpoint, head, blocks, parameters, storages, scale, part, coef, target, last)
                for storage in storages:
                    for scope, errors in _errors(grads[REFERENCE], grads[storage], of_head).items():
                        found[storage, part, scope] = errors
                grads.clear()
            lines += [
                UpdateLine(storage, scale, part, scope, blocks.predictions, coef, target, *found[storage, part, scope])
                for storage in storages
                for part in PARTS
                for scope in SCOPES
            ]
    return tuple(lines)


@dataclass(frozen=True)
class UpdateLine:
    """One storage, logit multiplier, part of the source and set of parameters."""

    storage: str
    logit_scale: float
    part: Part
    scope: Scope
    tokens: int
    coef: float
    target: float
    grad_rel_error: float
    """Δ_θ; for part "total" the same ratio of the CE + Z gradient."""
    grad_cosine: float
    adam_rel_error: float
    """Of the first-step direction, mean-reduced gradient, ε_Adam = 1e-8."""
    adam_cosine: float

    def result(self) -> UpdateErrors:
        """The line as the result file holds it."""
        return UpdateErrors(
            storage=self.storage,
            logit_scale=self.logit_scale,
            part=self.part,
            scope=self.scope,
            tokens=self.tokens,
            grad_rel_error=self.grad_rel_error,
            grad_cosine=self.grad_cosine,
            adam_dir_rel_error=self.adam_rel_error,
            adam_dir_cosine=self.adam_cosine,
        )


def _errors(
    want: Sequence[Tensor], got: Sequence[Tensor], of_head: Sequence[bool]
) -> dict[Scope, tuple[float, float, float, float]]:
    """By scope: relative error and cosine of the gradient, then of the Adam direction."""
    sums = {scope: np.zeros((2, 4)) for scope in SCOPES}
    for a, b, inside in zip(want, got, of_head, strict=True):
        products = np.array([_products(a, b), _products(first_direction(a), first_direction(b))])
        for scope in SCOPES if inside else SCOPES[1:]:
            sums[scope] += products
    return {scope: (*_error_and_cosine(gradient), *_error_and_cosine(adam)) for scope, (gradient, adam) in sums.items()}


def _products(want: Tensor, got: Tensor) -> tuple[float, float, float, float]:
    """‖got − want‖², ‖want‖², ‖got‖² and ⟨want, got⟩ of one parameter, in fp64; those of disjoint parameters add up."""
    a, b = want.double().flatten(), got.double().flatten()
    dot, want2, got2 = float(a @ b), float(a @ a), float(b @ b)
    error = b.sub_(a)
    return float(error @ error), want2, got2, dot


def _error_and_cosine(products: np.ndarray[Any, Any]) -> tuple[float, float]:
    error2, want2, got2, dot = products.tolist()
    return (error2 / max(want2, TINY)) ** 0.5, dot / max((want2 * got2) ** 0.5, TINY)


def _gradients(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    parameters: Sequence[Tensor],
    storages: Sequence[Storage],
    scale: float,
    part: Part,
    coef: float,
    target: float,
    advance: Callable[[int], None],
) -> dict[str, list[Tensor]]:
    """Mean-reduced parameter gradients of one part by storage, or reference, summed block by block."""
    sums: dict[str, list[Tensor]] = {
        name: [torch.zeros_like(parameter) for parameter in parameters] for name in (REFERENCE, *storages)
    }
    with hidden_states(checkpoint, head) as hidden_of:
        for block in range(blocks.count):
            label_T = blocks.targets(block, block + 1).flatten()
            with torch.enable_grad():
                hidden = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))
                logits_TV = head.logits(hidden.flatten(0, 1)) * scale
            z_TV = logits_TV.detach()
            truth = truth_of(z_TV, label_T, coef, target)
            seeds = {REFERENCE: (truth.total_CV if part == "total" else truth.z_CV).to(z_TV.dtype)}
            del truth
            for storage in storages:
                seeds[storage] = _read_back(z_TV.to(storage_dtype(storage)), label_T, coef, target)[part].to(z_TV.dtype)
            last = next(reversed(seeds))
            for name, seed_TV in seeds.items():
                found = torch.autograd.grad(
                    logits_TV, parameters, seed_TV / blocks.predictions, retain_graph=name != last, allow_unused=True
                )
                for total, grad in zip(sums[name], found, strict=True):
                    if grad is not None:
                        total += grad
            advance(len(label_T))
    return sums


@torch.no_grad()
def _read_back(stored_TV: Tensor, label_T: Tensor, coef: float, target: float) -> dict[Part, Tensor]:
    """Both sources, as a loss computes them from stored logits with fp32 statistics."""
    z_TV = stored_TV.float()
    log_z_T = torch.logsumexp(z_TV, dim=-1, keepdim=True)
    p_TV = torch.exp(z_TV - log_z_T)
    source_TV = 2 * coef * (log_z_T - target) * p_TV
    total_TV = p_TV + source_TV
    total_TV.scatter_add_(1, label_T.unsqueeze(1), total_TV.new_full((len(label_T), 1), -1.0))
    return {"total": total_TV, "z": source_TV}


@contextmanager
def trainable(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Every floating-point parameter requires a gradient inside, as in training; the flags are restored afterwards."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = [parameter for parameter, _ in before if parameter.is_floating_point()]
    for parameter in chosen:
        parameter.requires_grad_()
    try:
        yield chosen
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)
