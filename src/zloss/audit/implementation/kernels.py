"""Kernel audit: the total gradient and the Z source that an implementation of CE + Z actually applies, against fp64.

Losses that take logits have two references, because storage and kernel err independently:

- fp64 of the logits before storage: the gradient that training intends (the paper's Δ_tot and Δ_Z);
- fp64 of the stored logits: the best result the kernel could return for its input.

The Z source is inferred from gradients alone: it is linear in λ, so (g(Λ) − g(0))·λ/Λ is the source at λ, and a large Λ
keeps the rounding of the CE part out of it. The same difference of two losses is the Z that is added to the scalar.

Losses that project hidden states themselves get rounded inputs, and the reference is fp64 of the *same* rounded numbers.
The remaining error arises inside the implementation: logits stored in 16 bits, statistics, accumulators. Gradients have the
dtype of the inputs, so 16-bit ones carry a final rounding of about 1e-3 (bf16) or 1e-4 (fp16). For our backends the logit
source itself is read too.

Axes: C tokens of a chunk, T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zloss.audit.implementation.implementations import Evaluation, Implementation, evaluate
from zloss.audit.implementation.source import (
    TINY,
    Tail,
    VectorErrors,
    fp64_head,
    joined_errors,
    storage_dtype,
    tail,
    token_chunks,
    vector_errors,
)
from zloss.errors import CoordinateError
from zloss.head.source import head_source
from zloss.measure.bf16_products import working_bf16_products
from zloss.models.output_head import OutputHead
from zloss.objectives import StandardZLoss
from zloss.results.options import LogitStorage

AMPLIFIED = 256.0
"""The largest Λ|log Z − c|: the gradient at Λ is far above its CE part, and far below the fp16 maximum."""


@dataclass(frozen=True)
class KernelLine:
    """One implementation at one dtype and logit multiplier. Numbers that need a Z or a head are None if it has none.

    The gradient is that at the logits, or at the hidden states for an implementation that projects them.
    """

    implementation: str
    storage: str
    """Dtype of the logits, or of hidden states and head."""
    logit_scale: float
    tokens: int
    coef: float
    target: float
    forward: float | None
    """|Ẑ − Z|/Z of the sum over all tokens."""
    delta_total: float
    """Δ_tot of the gradient of all tokens: ‖ĝ − g‖_F / ‖g‖_F."""
    delta_z: float | None
    """Δ_Z, likewise of the Z source."""
    z_cosine: float | None
    """Mean over tokens of the cosine between applied and true Z part."""
    token_total: Tail
    """Δ_tot token by token: confident tokens have almost no CE gradient, so its tail is long in any precision."""
    token_z: Tail | None
    kernel_delta_total: float
    """Against fp64 of the inputs as they were given: the kernel's share of the error."""
    kernel_delta_z: float | None
    total_cosine: float
    """Cosine of the gradient of all tokens."""
    delta_weight: float | None = None
    """Relative error of the gradient at the head, Frobenius norms."""
    delta_src: Tail | None = None
    """Per token, of the logit source that a projecting backend of ours applies; None for other losses."""
    source_cosine: float | None = None
    """Mean over tokens of the cosine of that source."""


def kernel_line(
    implementation: Implementation,
    head: OutputHead,
    hidden_TD: Tensor,
    label_T: Tensor,
    *,
    storage: LogitStorage,
    logit_scale: float,
    coef: float,
    target: float,
    advance: Callable[[int], None] = lambda tokens: None,
    note: Callable[[str], None] = lambda sentence: None,
) -> KernelLine:
    """Audit an implementation on the head's input; c is `fixed_target` where it has one.

    One that takes logits gets them chunk by chunk, and `advance` receives the tokens of each. One that projects gets all
    tokens at once; `note` receives a sentence if its 16-bit products take a slow path.
    """
    target = target if implementation.fixed_target is None else implementation.fixed_target
    coef = coef if implementation.has_z else 0.0
    projects, dtype = implementation.takes == "linear", storage_dtype(storage)
    reference = fp64_head(head)
    errors: dict[str, list[VectorErrors]] = defaultdict(list)
    value = value_got = 0.0
    inputs: tuple[Tensor, ...]
    for chunk in [slice(None)] if projects else token_chunks(len(label_T), head.vocab):
        label_C = label_T[chunk]
        if projects:
            inputs = linear_inputs(head, hidden_TD, dtype, logit_scale)
            weight = inputs[1].double()
            z_CV = inputs[0].double() @ weight.T
            truth = given = sources_of(z_CV, label_C, coef, target)
        else:
            z_CV = reference.logits(hidden_TD[chunk].detach().double()) * logit_scale
            inputs = (z_CV.to(dtype),)
            truth, given = (sources_of(logits.double(), label_C, coef, target) for logits in (z_CV, *inputs))
        with working_bf16_products(note) if projects else nullcontext():
            total, z = total_and_z(implementation, inputs, label_C, coef, target, truth.violation)
        for prefix, want in (("", truth), ("kernel_", given)):
            for name, got, source_CV in (("total", total, want.total_CV), ("z", z, want.z_CV)):
                if got is not None:
                    wanted = source_CV @ weight if projects else source_CV
                    errors[prefix + name].append(vector_errors(got.grads[0], wanted))
        if z is not None:
            value, value_got = value + truth.value, value_got + z.value
        advance(len(label_C))
    joined = {name: joined_errors(parts) for name, parts in errors.items()}
    whole = {name: found.whole for name, found in joined.items()}
    line = KernelLine(
        implementation=implementation.name,
        storage=storage,
        logit_scale=logit_scale,
        tokens=hidden_TD.shape[0],
        coef=coef,
        target=target,
        forward=abs(value_got - value) / max(value, TINY) if implementation.has_z else None,
        delta_total=whole["total"],
        delta_z=whole.get("z"),
        z_cosine=tail(joined["z"].cosine).mean if implementation.has_z else None,
        token_total=tail(joined["total"].delta),
        token_z=tail(joined["z"].delta) if implementation.has_z else None,
        kernel_delta_total=whole["kernel_total"],
        kernel_delta_z=whole.get("kernel_z"),
        total_cosine=joined["total"].whole_cosine,
    )
    if not projects:
        return line
    at_head = vector_errors(total.grads[1].flatten(), (truth.total_CV.T @ inputs[0].double()).flatten())
    line = replace(line, delta_weight=float(at_head.delta))
    if implementation.backend is None or implementation.kernel:
        return line
    objective, backend = StandardZLoss(coef, target), implementation.backend
    applied_CV = head_source(inputs[0], inputs[1], label_T, objective, part="z", reduction="sum", backend=backend)
    source = vector_errors(applied_CV, truth.z_CV)
    return replace(line, delta_src=tail(source.delta), source_cosine=tail(source.cosine).mean)


def linear_inputs(head: OutputHead, hidden_TD: Tensor, dtype: torch.dtype, logit_scale: float) -> tuple[Tensor, Tensor]:
    """(hidden, weight) with the logits as their product: the weight includes scale and multiplier, a bias is one more column."""
    if head.softcap is not None:
        raise CoordinateError(
            f"the head caps its logits at {head.softcap:g}, but losses that compute their own logits are audited without a cap: "
            "audit losses that take logits instead."
        )
    weight_VD = head.weight_VD.detach()
    if head.bias_V is not None:
        hidden_TD = torch.cat([hidden_TD, hidden_TD.new_ones((hidden_TD.shape[0], 1))], dim=1)
        weight_VD = torch.cat([weight_VD, head.bias_V.detach().unsqueeze(1)], dim=1)
    return hidden_TD.detach().to(dtype), (weight_VD * (head.logit_scale * logit_scale)).to(dtype)


def total_and_z(
    implementation: Implementation,
    inputs: Sequence[Tensor],
    label_C: Tensor,
    coef: float,
    target: float,
    violation: float,
) -> tuple[Evaluation, Evaluation | None]:
    """(CE + Z at λ, Z alone at λ): gradients and values; None for an implementation without a Z."""
    if not implementation.has_z:
        return evaluate(implementation, inputs, label_C, [0.0], target)[0], None
    amplified = AMPLIFIED / max(violation, TINY)
    total, off, on = evaluate(implementation, inputs, label_C, [coef, 0.0, amplified], target)
    share = coef / amplified
    grads = tuple((b.double() - a.double()) * share for a, b in zip(off.grads, on.grads, strict=True))
    return total, Evaluation((on.value - off.value) * share, grads)


def gradient_difference(
    one: Implementation,
    other: Implementation,
    stored_TV: Tensor,
    label_T: Tensor,
    *,
    coef: float,
    target: float,
) -> float:
    """‖g_one − g_other‖_F / ‖g_other‖_F of the total logit gradients of two implementations on the same stored logits."""
    got, want = (evaluate(each, (stored_TV,), label_T, [coef], target)[0].grads[0].flatten() for each in (one, other))
    return float(vector_errors(got, want).delta)


class Sources(NamedTuple):
    """The logit sources of C tokens, sum-reduced."""

    total_CV: Tensor
    """p − y + 2λ(log Z − c)p."""
    z_CV: Tensor
    """2λ(log Z − c)p."""
    value: float
    """Σ λ(log Z − c)²."""
    violation: float
    """Largest |log Z − c|."""


@torch.no_grad()
def sources_of(z_CV: Tensor, label_C: Tensor, coef: float, target: float) -> Sources:
    """Both sources by their definition, in the dtype of the logits: fp64 for the truth."""
    log_z_C = torch.logsumexp(z_CV, dim=-1)
    p_CV = torch.exp(z_CV - log_z_C.unsqueeze(1))
    violation_C = log_z_C - target
    source_CV = p_CV * (2 * coef * violation_C).unsqueeze(1)
    total_CV = p_CV.add_(source_CV)
    total_CV.scatter_add_(1, label_C.unsqueeze(1), total_CV.new_full((len(label_C), 1), -1.0))
    return Sources(total_CV, source_CV, float(coef * violation_C.square().sum()), float(violation_C.abs().max()))
