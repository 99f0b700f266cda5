"""Kernel audit of losses that project themselves: CE + Z from hidden states and the head, in 16-bit or fp32 inputs.

The inputs are rounded first; the truth is fp64 of the *same* rounded numbers, so what remains is what the implementation
loses inside: logits it stores in 16 bits, statistics, accumulators. Its gradients arrive at hidden states (one vector per
token) and head in the dtype of the inputs, so 16-bit ones carry a last rounding of about 1e-3 (bf16) or 1e-4 (fp16).
For our backends the logit source itself is read too.

Axes: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.audit.implementation.implementations import Implementation
from zloss.audit.implementation.kernels import TINY, Truth, VectorTally, apart, truth_of
from zloss.audit.implementation.storage import Storage, storage_dtype
from zloss.audit.implementation.tail import Tail
from zloss.errors import CoordinateError
from zloss.head.source import head_source
from zloss.measure.bf16_products import working_bf16_products
from zloss.models.output_head import OutputHead
from zloss.objectives import StandardZLoss


@dataclass(frozen=True)
class LinearLine:
    """One projecting implementation at one input dtype and logit multiplier."""

    implementation: str
    inputs: str
    logit_scale: float
    tokens: int
    coef: float
    target: float
    forward: float | None
    """|Ẑ − Z|/Z of the sum over all tokens; None without a Z."""
    hidden_total: float
    """Of the gradient at all hidden states, Frobenius norms."""
    hidden_z: float | None
    weight_total: float
    """Of the gradient at the head, Frobenius norms."""
    weight_z: float | None
    delta_src: Tail | None
    """Ours: per token, of the logit source as the backend applies it."""
    source_cosine: float | None = None
    """Mean over tokens of the cosine of that source."""
    total_cosine: float | None = None
    """Cosine of the gradient at all hidden states."""
    z_cosine: float | None = None
    """Mean over tokens of the cosine of its Z part at the hidden states."""


def linear_inputs(head: OutputHead, hidden_TD: Tensor, dtype: torch.dtype, logit_scale: float) -> tuple[Tensor, Tensor]:
    """(hidden, weight) whose plain product is the logits: scale and multiplier inside the weight, a bias as one more column."""
    if head.softcap is not None:
        raise CoordinateError(
            f"the head caps its logits at {head.softcap:g}, and losses that project themselves are audited without a cap: "
            "audit those that take logits."
        )
    weight_VD = head.weight_VD.detach()
    if head.bias_V is not None:
        hidden_TD = torch.cat([hidden_TD, hidden_TD.new_ones((hidden_TD.shape[0], 1))], dim=1)
        weight_VD = torch.cat([weight_VD, head.bias_V.detach().unsqueeze(1)], dim=1)
    return hidden_TD.detach().to(dtype), (weight_VD * (head.logit_scale * logit_scale)).to(dtype)


def linear_line(
    implementation: Implementation,
    head: OutputHead,
    hidden_TD: Tensor,
    label_T: Tensor,
    *,
    inputs: Storage,
    logit_scale: float,
    coef: float,
    target: float,
    note: Callable[[str], None] = lambda sentence: None,
) -> LinearLine:
    """Audit one implementation of `takes == "linear"` on one batch; c is its own where it knows only one."""
    target = target if implementation.fixed_target is None else implementation.fixed_target
    coef = coef if implementation.has_z else 0.0
    hidden, weight = linear_inputs(head, hidden_TD, storage_dtype(inputs), logit_scale)
    truth = truth_of(hidden.double() @ weight.double().T, label_T, coef, target)
    with working_bf16_products(note):
        total, z = apart(implementation, (hidden, weight), label_T, coef, target, truth.violation)
    tallies = {"total": VectorTally(), "z": VectorTally()}
    weight_error: dict[str, float] = {}
    for name, outcome, source_TV in (("total", total, truth.total_CV), ("z", z, truth.z_CV)):
        if outcome is not None:
            tallies[name].update(outcome.grads[0], source_TV @ weight.double())
            want_VD = source_TV.T @ hidden.double()
            difference = (outcome.grads[1].double() - want_VD).norm()
            weight_error[name] = float(difference / want_VD.norm().clamp_min(TINY))
    source = _applied_source(implementation, hidden, weight, label_T, truth, coef, target)
    return LinearLine(
        implementation=implementation.name,
        inputs=inputs,
        logit_scale=logit_scale,
        tokens=hidden.shape[0],
        coef=coef,
        target=target,
        forward=None if z is None else abs(z.value - truth.value) / max(truth.value, TINY),
        hidden_total=tallies["total"].whole,
        hidden_z=None if z is None else tallies["z"].whole,
        weight_total=weight_error["total"],
        weight_z=weight_error.get("z"),
        delta_src=None if source is None else source.delta.tail(),
        source_cosine=None if source is None else source.cosine.tail().mean,
        total_cosine=tallies["total"].whole_cosine,
        z_cosine=None if z is None else tallies["z"].cosine.tail().mean,
    )


def _applied_source(
    implementation: Implementation,
    hidden: Tensor,
    weight: Tensor,
    label_T: Tensor,
    truth: Truth,
    coef: float,
    target: float,
) -> VectorTally | None:
    if implementation.backend is None or implementation.kernel:
        return None
    options: dict[str, Any] = {"part": "z", "reduction": "sum", "backend": implementation.backend}
    tally = VectorTally()
    tally.update(head_source(hidden, weight, label_T, StandardZLoss(coef, target), **options), truth.z_CV)
    return tally
