"""Update audit: does a wrong source reach the parameters, and Adam?

The reference source (fp64 statistics of the fp32 logits) and the source of the same logits stored in 16 bits go through
one model graph; what arrives at the parameters is compared. For a tied head the head's gradient holds both paths.

    Δ_θ = ‖ĝ − g‖_F / ‖g‖_F   (paper eq:backward_deltas),   the same for the first Adam direction g/(|g| + 1e-8)

Gradients are mean-reduced over all predictions of the batch. Axes: T tokens of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from zloss.audit.implementation.kernels import TINY, truth_of
from zloss.audit.implementation.storage import Storage, storage_dtype
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead
from zloss.optimizer.adam import first_direction
from zloss.text.blocks import Blocks

Part = Literal["total", "z"]
Scope = Literal["head", "all"]
PARTS: tuple[Part, ...] = ("total", "z")
REFERENCE = "reference"


@dataclass(frozen=True)
class UpdateRow:
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


@torch.no_grad()
def read_back(stored_TV: Tensor, label_T: Tensor, coef: float, target: float) -> dict[Part, Tensor]:
    """Both sources as a loss forms them from stored logits: statistics in fp32."""
    z_TV = stored_TV.float()
    log_z_T = torch.logsumexp(z_TV, dim=-1, keepdim=True)
    p_TV = torch.exp(z_TV - log_z_T)
    source_TV = 2 * coef * (log_z_T - target) * p_TV
    total_TV = p_TV + source_TV
    total_TV.scatter_add_(1, label_T.unsqueeze(1), total_TV.new_full((len(label_T), 1), -1.0))
    return {"total": total_TV, "z": source_TV}


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
) -> tuple[UpdateRow, ...]:
    """Rows for every storage, multiplier, part and scope; `advance` is told the tokens of each block and multiplier."""
    rows: list[UpdateRow] = []
    with trainable(checkpoint.model) as parameters:
        scopes: dict[Scope, Sequence[int]] = {
            "head": [i for i, parameter in enumerate(parameters) if _of_head(parameter, head)],
            "all": range(len(parameters)),
        }
        for scale in logit_scales:
            grads = _gradients(checkpoint, head, blocks, parameters, storages, scale, coef, target, advance)
            rows += [
                UpdateRow(storage, scale, part, scope, blocks.predictions, coef, target, *errors)
                for storage, part, scope, errors in _errors(grads, storages, scopes)
            ]
            grads.clear()  # the next multiplier needs the room
    return tuple(rows)


def _errors(
    grads: Mapping[tuple[str, Part], list[Tensor]], storages: Sequence[Storage], scopes: Mapping[Scope, Sequence[int]]
) -> Iterator[tuple[Storage, Part, Scope, tuple[float, ...]]]:
    """Relative error and cosine of gradient and Adam direction for every storage, part and scope."""
    for storage in storages:
        for part in PARTS:
            want, got = grads[REFERENCE, part], grads[storage, part]
            for scope, chosen in scopes.items():
                pairs = [(want[i], got[i]) for i in chosen]
                yield storage, part, scope, (*_compare(pairs), *_compare(pairs, first_direction))


def _gradients(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    parameters: Sequence[Tensor],
    storages: Sequence[Storage],
    scale: float,
    coef: float,
    target: float,
    advance: Callable[[int], None],
) -> dict[tuple[str, Part], list[Tensor]]:
    """Mean-reduced parameter gradients by (storage or reference, part), summed block by block."""
    sums: dict[tuple[str, Part], list[Tensor]] = {
        (name, part): [torch.zeros_like(p) for p in parameters] for name in (REFERENCE, *storages) for part in PARTS
    }
    with hidden_states(checkpoint, head) as hidden_of:
        for block in range(blocks.count):
            label_T = blocks.targets(block, block + 1).flatten()
            with torch.enable_grad():
                hidden = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))
                logits_TV = head.logits(hidden.flatten(0, 1)) * scale
            z_TV = logits_TV.detach()
            truth = truth_of(z_TV, label_T, coef, target)
            seeds: dict[tuple[str, Part], Tensor] = {
                (REFERENCE, "total"): truth.total_CV.to(z_TV.dtype),
                (REFERENCE, "z"): truth.z_CV.to(z_TV.dtype),
            }
            for storage in storages:
                sources = read_back(z_TV.to(storage_dtype(storage)), label_T, coef, target)
                seeds |= {(storage, part): sources[part].to(z_TV.dtype) for part in PARTS}
            last = next(reversed(seeds))
            for key, seed_TV in seeds.items():
                found = torch.autograd.grad(
                    logits_TV, parameters, seed_TV / blocks.predictions, retain_graph=key != last, allow_unused=True
                )
                for total, grad in zip(sums[key], found, strict=True):
                    if grad is not None:
                        total += grad
            advance(len(label_T))
    return sums


@contextmanager
def trainable(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Every floating parameter asks for a gradient, as in training; the flags are put back afterwards."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = [parameter for parameter, _ in before if parameter.is_floating_point()]
    for parameter in chosen:
        parameter.requires_grad_()
    try:
        yield chosen
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def _of_head(parameter: Tensor, head: OutputHead) -> bool:
    own = [head.weight_VD] if head.bias_V is None else [head.weight_VD, head.bias_V]
    return any(parameter.data_ptr() == tensor.data_ptr() for tensor in own)


def _compare(
    pairs: Sequence[tuple[Tensor, Tensor]], transform: Callable[[Tensor], Tensor] = lambda grad: grad
) -> tuple[float, float]:
    """(relative error, cosine) of two lists of tensors taken as one vector each, in fp64."""
    error2 = want2 = got2 = dot = 0.0
    for want, got in pairs:
        a, b = transform(want).double(), transform(got).double()
        error2 += float((b - a).square().sum())
        want2 += float(a.square().sum())
        got2 += float(b.square().sum())
        dot += float((a * b).sum())
    return (error2 / max(want2, TINY)) ** 0.5, dot / max((want2 * got2) ** 0.5, TINY)
