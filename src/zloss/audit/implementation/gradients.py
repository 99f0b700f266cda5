"""What reaches the parameters: the error of stored logits up to Adam's direction, and the fp16 loss scale that gradients allow.

Update audit: the reference source (fp64 statistics of the fp32 logits) and the source of the same logits stored in 16 bits go
through one model graph, and the resulting parameter gradients are compared. For a tied head the head's gradient holds both
paths.

    Δ_θ = ‖ĝ − g‖_F / ‖g‖_F   (paper eq:backward_deltas),   the same for the first Adam direction g/(|g| + 1e-8)

Gradients are mean-reduced over all predictions of the batch. Axes: T tokens of a block, V vocabulary.

Overflow audit: how large a static fp16 loss scale the full-model gradient of each method allows (paper eq:overflow_proxy). One
batch is one block. The loss is mean-reduced, and the gradients are those an optimizer would receive: before clipping and before
any loss scale. The head is part of what is audited. "paper": the head module computes the logits in the autocast dtype, and the
loss reads them in fp32. "fused": `head_loss` computes fp32 logits from the same operands and stores none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from zloss.audit.implementation.kernels import sources_of
from zloss.audit.implementation.source import joined_errors, storage_dtype, vector_errors
from zloss.errors import CoordinateError
from zloss.head.loss import head_loss
from zloss.measure.bf16_products import working_bf16_products
from zloss.measure.paper_loss import paper_loss
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, all_parameters_on, hidden_states
from zloss.objectives import Objective
from zloss.optimizer.endpoints import STATIC_SCALES, fp16_margin
from zloss.optimizer.recorder import first_direction
from zloss.results.implementation_audit import Fp16Headroom, UpdateErrors
from zloss.results.options import HeadKind, LogitStorage
from zloss.text import Blocks

Part = Literal["total", "z"]
Scope = Literal["head", "all"]
PARTS: tuple[Part, ...] = ("total", "z")
SCOPES: tuple[Scope, ...] = ("head", "all")
REFERENCE = "reference"
DIRECTIONS: tuple[Callable[[Tensor], Tensor], ...] = (lambda grad: grad, first_direction)
"""What is compared: the gradient, and the first Adam direction."""


def update_audit(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    *,
    storages: Sequence[LogitStorage] = ("bf16", "fp16"),
    logit_scales: Sequence[float] = (1, 4),
    coef: float = 1e-4,
    target: float,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[UpdateErrors, ...]:
    """One line per storage, multiplier, part and scope; `advance` receives the tokens of each block and multiplier."""
    lines: dict[tuple[float, LogitStorage, Part, Scope], UpdateErrors] = {}
    with all_parameters_on(checkpoint.model):
        parameters = [parameter for parameter in checkpoint.model.parameters() if parameter.requires_grad]
        head_data = {tensor.data_ptr() for tensor in (head.weight_VD, head.bias_V) if tensor is not None}
        of_head = [parameter.data_ptr() in head_data for parameter in parameters]
        for scale in logit_scales:
            # One part at a time, because each storage needs a copy of the model's gradients.
            for part in PARTS:
                last = advance if part == PARTS[-1] else lambda tokens: None
                grads = _gradients(checkpoint, head, blocks, parameters, storages, scale, part, coef, target, last)
                for storage in storages:
                    # Row by row: one sum over all entries of a large parameter would lose digits.
                    errors = [
                        [vector_errors(_rows(of(got)), _rows(of(want))) for of in DIRECTIONS]
                        for want, got in zip(grads[REFERENCE], grads[storage], strict=True)
                    ]
                    for scope in SCOPES:
                        chosen = [
                            each for each, inside in zip(errors, of_head, strict=True) if inside or scope == "all"
                        ]
                        gradient, adam = (joined_errors(found) for found in zip(*chosen, strict=True))
                        lines[scale, storage, part, scope] = UpdateErrors(
                            storage=storage,
                            logit_scale=scale,
                            part=part,
                            scope=scope,
                            tokens=blocks.predictions,
                            grad_rel_error=gradient.whole,
                            grad_cosine=gradient.whole_cosine,
                            adam_dir_rel_error=adam.whole,
                            adam_dir_cosine=adam.whole_cosine,
                        )
                grads.clear()
    return tuple(lines[key] for key in product(logit_scales, storages, PARTS, SCOPES))


def _rows(grad: Tensor) -> Tensor:
    """[rows, entries] of a parameter's gradient; a vector is one row."""
    return grad.reshape(len(grad) if grad.ndim > 1 else 1, -1)


def _gradients(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    parameters: Sequence[Tensor],
    storages: Sequence[LogitStorage],
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
            # A loss reads stored logits with fp32 statistics.
            read: dict[str, Tensor] = {REFERENCE: z_TV.double()}
            read |= {name: z_TV.to(storage_dtype(name)).float() for name in storages}
            seeds = {}
            for name, read_TV in read.items():
                sources = sources_of(read_TV, label_T, coef, target)
                seeds[name] = (sources.total_CV if part == "total" else sources.z_CV).to(z_TV.dtype)
            for name, seed_TV in seeds.items():
                found = torch.autograd.grad(
                    logits_TV,
                    parameters,
                    seed_TV / blocks.predictions,
                    retain_graph=name != storages[-1],
                    allow_unused=True,
                )
                for total, grad in zip(sums[name], found, strict=True):
                    if grad is not None:
                        total += grad
            advance(len(label_T))
    return sums


def overflow_audit(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    objectives: Mapping[str, Objective],
    *,
    coef: float,
    scales: Sequence[int] = STATIC_SCALES,
    autocast: torch.dtype | None = torch.bfloat16,
    kind: HeadKind = "paper",
    advance: Callable[[int], None] = lambda tokens: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> tuple[Fp16Headroom, ...]:
    """One line per objective, all from the same forward pass of each batch; `kind`: how the head computes its logits.

    `coef` is the λ of the objectives that have one, for the record.
    """
    device = head.weight_VD.device.type
    norms: dict[str, list[tuple[float, float]]] = {name: [] for name in objectives}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        stack.enter_context(all_parameters_on(checkpoint.model))
        parameters = [parameter for parameter in checkpoint.model.parameters() if parameter.requires_grad]
        if autocast is not None:
            if device == "cpu" and autocast == torch.bfloat16:
                stack.enter_context(working_bf16_products(note))
            stack.enter_context(torch.autocast(device, dtype=autocast))
        stack.enter_context(torch.enable_grad())
        for block in range(blocks.count):
            # A hook captures the hidden states and ends the forward pass; "paper" calls the head afterwards.
            with hidden_states(checkpoint, head) as hidden_of:
                hidden = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))
            label = blocks.targets(block, block + 1)
            for name, objective in objectives.items():
                if name not in reasons:
                    try:
                        loss = _loss(head, hidden, label, objective, kind)
                    except CoordinateError as error:
                        reasons[name] = str(error)
                        continue
                    norms[name].append(gradient_norms(loss, parameters))
            advance(blocks.size)
    return tuple(
        _headroom(name, coef if objectives[name].active else 0.0, found, scales, reasons.get(name, ""))
        for name, found in norms.items()
    )


def _loss(head: OutputHead, hidden: Tensor, label: Tensor, objective: Objective, kind: HeadKind) -> Tensor:
    if kind == "paper":
        return paper_loss(head, hidden, label, objective).loss
    return head_loss(
        hidden,
        head.weight_VD,
        label,
        objective,
        bias=head.bias_V,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        statistics="light",
    ).loss


def gradient_norms(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[float, float]:
    """(‖g‖₂, ‖g‖_∞) over all parameters, nonfinite if any entry is; the graph is kept."""
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    found = [grad for grad in grads if grad is not None]
    two = sum(float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for grad in found) ** 0.5
    # The maximum of tensors keeps a NaN, that of Python numbers may drop it.
    inf = float(torch.stack([torch.linalg.vector_norm(grad, ord=torch.inf).double() for grad in found]).max())
    return two, inf


def _headroom(
    method: str, coef: float, norms: Sequence[tuple[float, float]], scales: Sequence[int], reason: str
) -> Fp16Headroom:
    """One method over all batches; batches whose gradient is not finite are left out of the mean norms."""
    if not norms:
        return Fp16Headroom(method, coef, 0, None, None, None, reason=reason)
    finite = [pair for pair in norms if all(math.isfinite(value) for value in pair)]
    two, inf = (sum(values) / len(finite) for values in zip(*finite, strict=True)) if finite else (None, None)
    infs = [inf for _, inf in norms]
    nonfinite = sum(not math.isfinite(value) for value in infs)
    return Fp16Headroom(method, coef, len(norms), two, inf, *fp16_margin(infs, scales), nonfinite, reason)
