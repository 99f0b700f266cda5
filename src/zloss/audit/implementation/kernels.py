"""Kernel audit: the total gradient and the Z source that an implementation of CE + Z actually applies, against fp64.

There are two references, because storage and kernel err independently:

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.audit.implementation.implementations import Evaluation, Implementation, evaluate
from zloss.audit.implementation.source import ReferenceHead, Storage, Tail, TailTally, storage_dtype, token_chunks
from zloss.errors import CoordinateError
from zloss.head.source import head_source
from zloss.measure.bf16_products import working_bf16_products
from zloss.models.output_head import OutputHead
from zloss.objectives import StandardZLoss

TINY = torch.finfo(torch.float64).tiny
AMPLIFIED = 256.0
"""Largest 2Λ|log Z − c| / 2 of the gradient at Λ: far above the CE part, far below the fp16 maximum."""


def kernel_line(
    implementation: Implementation,
    head: ReferenceHead,
    hidden_TD: Tensor,
    label_T: Tensor,
    *,
    storage: Storage,
    logit_scale: float,
    coef: float,
    target: float,
    advance: Callable[[int], None] = lambda tokens: None,
) -> KernelLine:
    """Audit an implementation with `takes == "logits"`; c is `fixed_target` where it has one."""
    target = target if implementation.fixed_target is None else implementation.fixed_target
    coef = coef if implementation.has_z else 0.0
    before_storage, of_stored = _GradientTally(), _GradientTally()
    value = value_got = 0.0
    for chunk in token_chunks(hidden_TD.shape[0], head.vocab):
        z_CV = head.logits(hidden_TD[chunk], logit_scale)
        stored_CV, label_C = z_CV.to(storage_dtype(storage)), label_T[chunk]
        truth = truth_of(z_CV, label_C, coef, target)
        total, z = total_and_z(implementation, (stored_CV,), label_C, coef, target, truth.violation)
        before_storage.update(total, z, truth.total_CV, truth.z_CV)
        stored = truth_of(stored_CV, label_C, coef, target)
        of_stored.update(total, z, stored.total_CV, stored.z_CV)
        if z is not None:
            value, value_got = value + truth.value, value_got + z.value
        advance(len(label_C))
    has_z = implementation.has_z
    return KernelLine(
        implementation=implementation.name,
        storage=storage,
        logit_scale=logit_scale,
        tokens=hidden_TD.shape[0],
        coef=coef,
        target=target,
        forward=abs(value_got - value) / max(value, TINY) if has_z else None,
        delta_total=before_storage.total.whole,
        delta_z=before_storage.z.whole if has_z else None,
        z_cosine=before_storage.z.cosine.tail().mean if has_z else None,
        token_total=before_storage.total.delta.tail(),
        token_z=before_storage.z.delta.tail() if has_z else None,
        kernel_delta_total=of_stored.total.whole,
        kernel_delta_z=of_stored.z.whole if has_z else None,
        total_cosine=before_storage.total.whole_cosine,
    )


@dataclass(frozen=True)
class KernelLine:
    """One implementation at one storage and logit multiplier."""

    implementation: str
    storage: str
    logit_scale: float
    tokens: int
    coef: float
    target: float
    forward: float | None
    """|Ẑ − Z|/Z of the sum over all tokens; None without a Z."""
    delta_total: float
    """Δ_tot of the whole [T, V] gradient against the logits before storage: ‖ĝ − g‖_F / ‖g‖_F."""
    delta_z: float | None
    """Δ_Z, likewise of the Z source."""
    z_cosine: float | None
    """Mean over tokens of the cosine between applied and true Z source."""
    token_total: Tail
    """Δ_tot token by token: confident tokens have almost no CE gradient, so its tail is long in any precision."""
    token_z: Tail | None
    kernel_delta_total: float
    """Against fp64 of the stored logits: the kernel's share of the error."""
    kernel_delta_z: float | None
    total_cosine: float
    """Cosine of the whole [T, V] gradient with that of the logits before storage."""

    @property
    def delta_weight(self) -> None:
        """A loss that takes logits has no gradient at the head."""


class _GradientTally:
    """Errors of the total gradient and of its Z part, chunk by chunk."""

    def __init__(self) -> None:
        self.total, self.z = VectorTally(), VectorTally()

    def update(self, total: Evaluation, z: Evaluation | None, want_total_CX: Tensor, want_z_CX: Tensor) -> None:
        self.total.update(total.grads[0], want_total_CX)
        if z is not None:
            self.z.update(z.grads[0], want_z_CX)


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
    """Audit an implementation with `takes == "linear"` on one batch; c is `fixed_target` where it has one."""
    target = target if implementation.fixed_target is None else implementation.fixed_target
    coef = coef if implementation.has_z else 0.0
    hidden, weight = linear_inputs(head, hidden_TD, storage_dtype(inputs), logit_scale)
    truth = truth_of(hidden.double() @ weight.double().T, label_T, coef, target)
    with working_bf16_products(note):
        total, z = total_and_z(implementation, (hidden, weight), label_T, coef, target, truth.violation)
    tally = _GradientTally()
    tally.update(total, z, truth.total_CV @ weight.double(), truth.z_CV @ weight.double())
    want_VD = truth.total_CV.T @ hidden.double()
    weight_error = (total.grads[1].double() - want_VD).norm() / want_VD.norm().clamp_min(TINY)
    source = _applied_source(implementation, hidden, weight, label_T, truth, coef, target)
    return LinearLine(
        implementation=implementation.name,
        inputs=inputs,
        logit_scale=logit_scale,
        tokens=hidden.shape[0],
        coef=coef,
        target=target,
        forward=None if z is None else abs(z.value - truth.value) / max(truth.value, TINY),
        delta_total=tally.total.whole,
        delta_z=None if z is None else tally.z.whole,
        delta_weight=float(weight_error),
        delta_src=None if source is None else source.delta.tail(),
        source_cosine=None if source is None else source.cosine.tail().mean,
        total_cosine=tally.total.whole_cosine,
        z_cosine=None if z is None else tally.z.cosine.tail().mean,
    )


@dataclass(frozen=True)
class LinearLine:
    """One implementation that projects hidden states, at one input dtype and logit multiplier."""

    implementation: str
    inputs: str
    logit_scale: float
    tokens: int
    coef: float
    target: float
    forward: float | None
    """|Ẑ − Z|/Z of the sum over all tokens; None without a Z."""
    delta_total: float
    """Relative error of the gradient at all hidden states, Frobenius norms."""
    delta_z: float | None
    delta_weight: float
    """Relative error of the gradient at the head, Frobenius norms."""
    delta_src: Tail | None
    """Per token, of the logit source that the backend applies; None for backends that are not ours."""
    source_cosine: float | None = None
    """Mean over tokens of the cosine of that source."""
    total_cosine: float | None = None
    """Cosine of the gradient at all hidden states."""
    z_cosine: float | None = None
    """Mean over tokens of the cosine of its Z part at the hidden states."""

    @property
    def kernel_delta_z(self) -> float | None:
        """Δ_Z: the reference is fp64 of the rounded inputs in any case."""
        return self.delta_z


def linear_inputs(head: OutputHead, hidden_TD: Tensor, dtype: torch.dtype, logit_scale: float) -> tuple[Tensor, Tensor]:
    """(hidden, weight) with the logits as their product: the weight includes scale and multiplier, a bias is one more column."""
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
    (a,), (b,) = (evaluate(implementation, (stored_TV,), label_T, [coef], target) for implementation in (one, other))
    difference = (a.grads[0].double() - b.grads[0].double()).norm()
    return float(difference / b.grads[0].double().norm().clamp_min(TINY))


def truth_of(logits_CV: Tensor, label_C: Tensor, coef: float, target: float) -> Truth:
    """Both sources of these logits, in fp64."""
    z_CV = logits_CV.double()
    log_z_C = torch.logsumexp(z_CV, dim=-1)
    p_CV = torch.exp(z_CV - log_z_C.unsqueeze(1))
    violation_C = log_z_C - target
    source_CV = p_CV * (2 * coef * violation_C).unsqueeze(1)
    total_CV = p_CV.add_(source_CV)
    total_CV.scatter_add_(1, label_C.unsqueeze(1), total_CV.new_full((len(label_C), 1), -1.0))
    return Truth(total_CV, source_CV, float(coef * violation_C.square().sum()), float(violation_C.abs().max()))


@dataclass(frozen=True)
class Truth:
    """fp64 sources of C tokens, per token (sum-reduced)."""

    total_CV: Tensor
    """p − y + 2λ(log Z − c)p."""
    z_CV: Tensor
    """2λ(log Z − c)p."""
    value: float
    """Σ λ(log Z − c)²."""
    violation: float
    """Largest |log Z − c|."""


class VectorTally:
    """Relative error and cosine of one vector per token, chunk by chunk."""

    def __init__(self) -> None:
        self.delta, self.cosine = TailTally(), TailTally()
        self.error2 = self.want2 = self.got2 = self.dot = 0.0

    @property
    def whole(self) -> float:
        """Relative error of the vectors of all tokens as one, Frobenius norms."""
        return math.sqrt(self.error2 / max(self.want2, TINY))

    @property
    def whole_cosine(self) -> float:
        """Cosine of the vectors of all tokens as one."""
        return self.dot / max(math.sqrt(self.want2 * self.got2), TINY)

    def update(self, got_CX: Tensor, want_CX: Tensor) -> None:
        got_CX, want_CX = got_CX.double(), want_CX.double()
        norm_C, norm_got_C = want_CX.norm(dim=-1), got_CX.norm(dim=-1)
        error_C = (got_CX - want_CX).norm(dim=-1)
        self.error2 += float(error_C.square().sum())
        self.want2 += float(norm_C.square().sum())
        self.got2 += float(norm_got_C.square().sum())
        dot_C = (got_CX * want_CX).sum(dim=-1)
        self.dot += float(dot_C.sum())
        self.delta.update(error_C / norm_C.clamp_min(TINY))
        self.cosine.update(dot_C / (norm_C * norm_got_C).clamp_min(TINY))
