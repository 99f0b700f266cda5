"""Kernel audit: the total gradient and the Z source that an implementation of CE + Z really applies, against fp64.

Two references, because two things go wrong apart from each other:

- the logits before storage: what training meant (the paper's Δ_tot and Δ_Z);
- the stored logits themselves, in fp64: what this kernel could have done at best with what it was given.

The Z source is seen through the gradients alone: it is linear in λ, so (g(Λ) − g(0))·λ/Λ is the source at λ, and a large
Λ keeps the rounding of the CE part out of it. The same difference of two losses is the Z it adds to the scalar.

Axes: C tokens of a chunk, T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zloss.audit.implementation.evaluate import Evaluation, evaluate
from zloss.audit.implementation.implementations import Implementation
from zloss.audit.implementation.storage import ReferenceHead, Storage, storage_dtype, token_chunks
from zloss.audit.implementation.tail import Tail, TailTally

TINY = torch.finfo(torch.float64).tiny
LOUD = 256.0
"""Largest 2Λ|log Z − c| / 2 of the loud gradient: far above the CE part, far below the fp16 maximum."""


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


def truth_of(logits_CV: Tensor, label_C: Tensor, coef: float, target: float) -> Truth:
    """Both sources of logits, in fp64."""
    z_CV = logits_CV.double()
    log_z_C = torch.logsumexp(z_CV, dim=-1)
    p_CV = torch.exp(z_CV - log_z_C.unsqueeze(1))
    violation_C = log_z_C - target
    source_CV = p_CV * (2 * coef * violation_C).unsqueeze(1)
    total_CV = p_CV.add_(source_CV)
    total_CV.scatter_add_(1, label_C.unsqueeze(1), total_CV.new_full((len(label_C), 1), -1.0))
    return Truth(total_CV, source_CV, float(coef * violation_C.square().sum()), float(violation_C.abs().max()))


@dataclass
class VectorTally:
    """Relative error and cosine of vectors, one per token, chunk by chunk."""

    delta: TailTally = field(default_factory=TailTally)
    cosine: TailTally = field(default_factory=TailTally)
    error2: float = 0.0
    want2: float = 0.0
    got2: float = 0.0
    dot: float = 0.0

    @property
    def whole(self) -> float:
        """Relative error of all tokens' vectors as one: Frobenius norms."""
        return math.sqrt(self.error2 / max(self.want2, TINY))

    @property
    def whole_cosine(self) -> float:
        """Cosine of all tokens' vectors as one."""
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
    """Against the stored logits in fp64: the part that is the kernel's own."""
    kernel_delta_z: float | None
    total_cosine: float
    """Cosine of the whole [T, V] gradient with that of the logits before storage."""


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
    """Audit one implementation of `takes == "logits"`; c is its own where it knows only one."""
    target = target if implementation.fixed_target is None else implementation.fixed_target
    coef = coef if implementation.has_z else 0.0
    meant, kernel = _Tallies(), _Tallies()
    value = value_got = 0.0
    for chunk in token_chunks(hidden_TD.shape[0], head.vocab):
        z_CV = head.logits(hidden_TD[chunk], logit_scale)
        stored_CV, label_C = z_CV.to(storage_dtype(storage)), label_T[chunk]
        truth = truth_of(z_CV, label_C, coef, target)
        total, z = apart(implementation, (stored_CV,), label_C, coef, target, truth.violation)
        meant.update(total.grads[0], None if z is None else z.grads[0], truth)
        kernel.update(total.grads[0], None if z is None else z.grads[0], truth_of(stored_CV, label_C, coef, target))
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
        delta_total=meant.total.whole,
        delta_z=meant.z.whole if has_z else None,
        z_cosine=meant.z.cosine.tail().mean if has_z else None,
        token_total=meant.total.delta.tail(),
        token_z=meant.z.delta.tail() if has_z else None,
        kernel_delta_total=kernel.total.whole,
        kernel_delta_z=kernel.z.whole if has_z else None,
        total_cosine=meant.total.whole_cosine,
    )


@dataclass
class _Tallies:
    total: VectorTally = field(default_factory=VectorTally)
    z: VectorTally = field(default_factory=VectorTally)

    def update(self, total_CV: Tensor, z_CV: Tensor | None, truth: Truth) -> None:
        self.total.update(total_CV, truth.total_CV)
        if z_CV is not None:
            self.z.update(z_CV, truth.z_CV)


def apart(
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
    loud = LOUD / max(violation, TINY)
    total, off, on = evaluate(implementation, inputs, label_C, [coef, 0.0, loud], target)
    share = coef / loud
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
    (a,), (b,) = (evaluate(way, (stored_TV,), label_T, [coef], target) for way in (one, other))
    difference = (a.grads[0].double() - b.grads[0].double()).norm()
    return float(difference / b.grads[0].double().norm().clamp_min(TINY))
