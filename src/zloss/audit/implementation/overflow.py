"""Overflow audit: how much static fp16 loss scale the full-model gradient of each method leaves (paper eq:overflow_proxy).

One batch is one block. The model runs under bf16 autocast with its parameters as they are, the loss is mean-reduced, and
the gradients are those an optimizer would receive: before clipping and before any loss scale.

The head is part of what is audited. "paper": the head module computes the logits in the autocast dtype, and the loss reads
them in fp32. "fused": `head_loss` computes fp32 logits from the same operands and stores none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.implementation.update import trainable
from zloss.errors import CoordinateError
from zloss.head.loss import head_loss
from zloss.measure.bf16_products import working_bf16_products
from zloss.measure.paper_loss import paper_loss
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, hidden_states
from zloss.objectives import Objective
from zloss.optimizer.endpoints import STATIC_SCALES, Fp16Margin, fp16_margin
from zloss.results.implementation_audit import Fp16Headroom
from zloss.results.options import HeadKind
from zloss.text import Blocks


def overflow_audit(
    checkpoint: Checkpoint,
    head: OutputHead,
    blocks: Blocks,
    objectives: Mapping[str, Objective],
    *,
    scales: Sequence[int] = STATIC_SCALES,
    autocast: torch.dtype | None = torch.bfloat16,
    kind: HeadKind = "paper",
    advance: Callable[[int], None] = lambda tokens: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> tuple[OverflowLine, ...]:
    """One line per objective, all from the same forward pass of each batch; `kind`: how the head computes its logits."""
    device = head.weight_VD.device.type
    norms: dict[str, list[tuple[float, float]]] = {name: [] for name in objectives}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        parameters = stack.enter_context(trainable(checkpoint.model))
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
    return tuple(_line(name, found, scales, reasons.get(name, "")) for name, found in norms.items())


@dataclass(frozen=True)
class OverflowLine:
    """One method over all batches. Where it has no gradient (softcap and centering), every number is None with a reason."""

    method: str
    batches: int
    grad_norm_mean: float | None
    """Mean over batches of ‖g‖₂ over all parameters; batches whose gradient is not finite are left out."""
    grad_inf_mean: float | None
    """The same of ‖g‖_∞."""
    margin: Fp16Margin | None
    reason: str = ""

    def result(self, coef: float) -> Fp16Headroom:
        """The line as the result file holds it."""
        margin = self.margin
        return Fp16Headroom(
            method=self.method,
            coef=coef,
            batches=self.batches,
            grad_norm_mean=self.grad_norm_mean,
            grad_inf_mean=self.grad_inf_mean,
            kappa_min=None if margin is None else margin.kappa_min,
            psi={} if margin is None else {f"psi_{scale}": share for scale, share in margin.psi.items()},
            nonfinite=0 if margin is None else margin.nonfinite,
            reason=self.reason,
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
    square, largest = 0.0, 0.0
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    for grad in grads:
        if grad is None:
            continue
        square += float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2
        here = float(torch.linalg.vector_norm(grad, ord=torch.inf))
        # max() would drop a NaN that comes second.
        largest = here if math.isnan(here) or here > largest else largest
        if math.isnan(largest):
            return math.nan, math.nan
    return square**0.5, largest


def _line(method: str, norms: Sequence[tuple[float, float]], scales: Sequence[int], reason: str) -> OverflowLine:
    if not norms:
        return OverflowLine(method, 0, None, None, None, reason)
    finite = [pair for pair in norms if all(math.isfinite(value) for value in pair)]
    two, inf = (sum(values) / len(finite) for values in zip(*finite, strict=True)) if finite else (None, None)
    return OverflowLine(method, len(norms), two, inf, fp16_margin([pair[1] for pair in norms], scales), reason)
