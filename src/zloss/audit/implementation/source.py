"""Source audit: the error of the Z source rebuilt from stored logits, while the scalar loss looks right.

For every token, with ẑ = z rounded to its storage and the statistics of ẑ read back:

    forward error   |L̂ − L| / L                          L = λ(log Z − c)², per token and summed over a block
    Δ_src           ‖δ̂ − δ‖₂ / ‖δ‖₂                      δ = 2λ(log Z − c)p          (paper eq:backward_deltas)
    δ̂ − δ  =  2λ( ε_Z p  +  (log Z − c) ε_p  +  ε_Z ε_p )                            (paper eq:source_mismatch)

The truth is fp64. λ cancels in every ratio. Axes: C tokens of a chunk, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zloss.audit.implementation.config import Storage as Storage
from zloss.errors import UnknownNameError
from zloss.head.source import z_loss_source
from zloss.measure.tokens import Array, finite, mean, quantile
from zloss.models.output_head import OutputHead
from zloss.results.implementation_audit import StoredLogits
from zloss.tensors import at_least_fp32

STORAGE: dict[Storage, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CHUNK_VALUES = 1 << 22
"""Entries of a chunk of logits: 32 MB in fp64; a measurement keeps about ten such tensors at a time."""
Statistics = Literal["fp32", "storage"]
"""Where log Ẑ and p̂ live: accumulated and kept in fp32, or rounded to the storage dtype themselves."""
TINY = torch.finfo(torch.float64).tiny
TERMS = ("epsilon_z", "epsilon_p", "product")


def source_audit(
    head: ReferenceHead,
    hidden_TD: Tensor,
    *,
    block_size: int,
    storages: Sequence[Storage] = ("fp32", "bf16", "fp16"),
    logit_scales: Sequence[float] = (1, 2, 4),
    coef: float = 1e-4,
    target: float,
    statistics: Statistics = "fp32",
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[SourceLine, ...]:
    """One line per storage and logit multiplier, on the logits of `hidden_TD`: blocks of `block_size` tokens in a row.

    `advance` receives the number of tokens of each finished chunk.
    """
    tallies = {(storage, scale): _SourceTally() for storage in storages for scale in logit_scales}
    for block_BD in torch.split(hidden_TD, block_size):
        for chunk in token_chunks(block_BD.shape[0], head.vocab):
            z_CV = head.logits(block_BD[chunk])
            for (storage, scale), tally in tallies.items():
                scaled_CV = z_CV * scale
                stored_CV = scaled_CV.to(storage_dtype(storage))
                tally.update(source_errors(scaled_CV, stored_CV, coef, target, statistics=statistics))
            advance(chunk.stop - chunk.start)
        for tally in tallies.values():
            tally.end_block()
    return tuple(tally.line(storage, scale, statistics, target) for (storage, scale), tally in tallies.items())


@dataclass(frozen=True)
class SourceLine:
    """The source audit of one storage dtype and logit multiplier."""

    storage: str
    logit_scale: float
    statistics: Statistics
    tokens: int
    target: float
    forward_scalar: float | None
    """Mean over blocks of |ΣL̂ − ΣL| / ΣL, the sums over a block's tokens: the scalar a training log shows."""
    forward: Tail
    """Per token |L̂ − L|/L."""
    delta_src: Tail
    """Per token Δ_src."""
    delta_src_all: float
    """Δ_src of the whole [T, V] source: ‖δ̂ − δ‖_F / ‖δ‖_F."""
    cosine: float | None
    """Mean over tokens of cos(δ̂, δ)."""
    terms: dict[str, float | None]
    """Mean over tokens of each term's norm over ‖δ‖₂."""
    residual: float
    """‖(δ̂ − δ) − sum of the three terms‖_F / ‖δ‖_F: only the fp32 rounding of the product 2λ(log Ẑ − c)p̂."""

    def result(self) -> StoredLogits:
        """The line as the result file holds it."""
        return StoredLogits(
            storage=self.storage,
            logit_scale=self.logit_scale,
            tokens=self.tokens,
            forward_rel_error=self.forward_scalar,
            delta_src=self.delta_src.mean,
            delta_src_p99=self.delta_src.p99,
            delta_src_max=self.delta_src.maximum,
            backward_cosine=self.cosine,
            nonfinite=self.delta_src.nonfinite,
        )


class _SourceTally:
    """Accumulates the errors of one line, chunk by chunk."""

    def __init__(self) -> None:
        self.scalar, self.forward, self.delta, self.cosine = TailTally(), TailTally(), TailTally(), TailTally()
        self.terms = {name: TailTally() for name in TERMS}
        self.tokens = 0
        self.value = self.value_got = 0.0  # of the current block
        self.error2 = self.norm2 = self.residual2 = 0.0

    def update(self, errors: SourceErrors) -> None:
        norm_C = errors.norm_C.clamp_min(TINY)
        self.forward.update(errors.forward_C)
        self.delta.update(errors.delta_C)
        self.cosine.update(errors.cosine_C)
        for name, tally in self.terms.items():
            tally.update(errors.terms[name] / norm_C)
        self.tokens += len(norm_C)
        self.residual2 += float(errors.residual_C.square().sum())
        self.value += float(errors.value_C.sum())
        self.value_got += float(errors.value_got_C.sum())
        self.error2 += float(errors.error_C.square().sum())
        self.norm2 += float(errors.norm_C.square().sum())

    def end_block(self) -> None:
        """Record the scalar of the block that ends here."""
        self.scalar.update(
            torch.tensor([abs(self.value_got - self.value) / max(self.value, TINY)], dtype=torch.float64)
        )
        self.value = self.value_got = 0.0

    def line(self, storage: str, logit_scale: float, statistics: Statistics, target: float) -> SourceLine:
        return SourceLine(
            storage=storage,
            logit_scale=logit_scale,
            statistics=statistics,
            tokens=self.tokens,
            target=target,
            forward_scalar=self.scalar.tail().mean,
            forward=self.forward.tail(),
            delta_src=self.delta.tail(),
            delta_src_all=(self.error2 / max(self.norm2, TINY)) ** 0.5,
            cosine=self.cosine.tail().mean,
            terms={name: tally.tail().mean for name, tally in self.terms.items()},
            residual=(self.residual2 / max(self.norm2, TINY)) ** 0.5,
        )


@torch.no_grad()
def source_errors(
    z_CV: Tensor, stored_CV: Tensor, coef: float, target: float, *, statistics: Statistics = "fp32"
) -> SourceErrors:
    """Compare the source of `stored_CV`, as an implementation that reads it would form it, with that of fp64 `z_CV`."""
    log_z_C = torch.logsumexp(z_CV, dim=-1)
    p_CV = torch.exp(z_CV - log_z_C.unsqueeze(1))
    violation_C = log_z_C - target
    read_CV = at_least_fp32(stored_CV) if statistics == "fp32" else stored_CV
    log_z_got_C, p_got_CV = torch.logsumexp(read_CV, dim=-1), torch.softmax(read_CV, dim=-1)
    if statistics == "fp32":
        source_got_CV = z_loss_source(stored_CV, coef, target, reduction="none").double()
    else:
        source_got_CV = (2 * coef * (log_z_got_C.float() - target).unsqueeze(1) * p_got_CV.float()).double()
    value_got_C = (coef * (log_z_got_C.float() - target) ** 2).double()

    epsilon_z_C = log_z_got_C.double() - log_z_C
    epsilon_p_CV = p_got_CV.double().sub_(p_CV)
    source_CV = p_CV * (2 * coef * violation_C).unsqueeze(1)
    left_CV = source_got_CV - source_CV
    error_C = left_CV.norm(dim=-1)
    terms = {}
    for name, factor_C, shape_CV in (
        ("epsilon_z", epsilon_z_C, p_CV),
        ("epsilon_p", violation_C, epsilon_p_CV),
        ("product", epsilon_z_C, epsilon_p_CV),
    ):
        term_CV = shape_CV * (2 * coef * factor_C).unsqueeze(1)
        terms[name] = term_CV.norm(dim=-1)
        left_CV -= term_CV
    return SourceErrors(
        value_C=coef * violation_C**2,
        value_got_C=value_got_C,
        norm_C=source_CV.norm(dim=-1),
        error_C=error_C,
        dot_C=(source_got_CV * source_CV).sum(dim=-1),
        norm_got_C=source_got_CV.norm(dim=-1),
        terms=terms,
        residual_C=left_CV.norm(dim=-1),
    )


@dataclass(frozen=True)
class SourceErrors:
    """Per token of a chunk, fp64."""

    value_C: Tensor
    """L, the true penalty."""
    value_got_C: Tensor
    """L̂, the penalty of the stored logits."""
    norm_C: Tensor
    """‖δ‖₂."""
    error_C: Tensor
    """‖δ̂ − δ‖₂."""
    dot_C: Tensor
    """⟨δ̂, δ⟩."""
    norm_got_C: Tensor
    """‖δ̂‖₂."""
    terms: dict[str, Tensor]
    """Norms of the three terms of the identity, in the order ε_Z, ε_p, product."""
    residual_C: Tensor
    """‖(δ̂ − δ) − sum of the three terms‖₂: the remainder of the identity."""

    @property
    def forward_C(self) -> Tensor:
        return (self.value_got_C - self.value_C).abs() / self.value_C.clamp_min(TINY)

    @property
    def delta_C(self) -> Tensor:
        return self.error_C / self.norm_C.clamp_min(TINY)

    @property
    def cosine_C(self) -> Tensor:
        return self.dot_C / (self.norm_C * self.norm_got_C).clamp_min(TINY)


@dataclass(frozen=True)
class ReferenceHead:
    """The head in fp64, from its parameters as they are: the reference before any storage."""

    weight_VD: Tensor
    bias_V: Tensor | None
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, head: OutputHead) -> ReferenceHead:
        bias_V = None if head.bias_V is None else head.bias_V.detach().double()
        return cls(head.weight_VD.detach().double(), bias_V, head.logit_scale, head.softcap)

    @property
    def vocab(self) -> int:
        return self.weight_VD.shape[0]

    @torch.no_grad()
    def logits(self, hidden_CD: Tensor, multiplier: float = 1.0) -> Tensor:
        """The model's final logits times `multiplier` (the paper's "logit ×"), fp64."""
        z_CV = torch.nn.functional.linear(hidden_CD.detach().double(), self.weight_VD, self.bias_V) * self.logit_scale
        if self.softcap is not None:
            z_CV = self.softcap * torch.tanh(z_CV / self.softcap)
        return z_CV.mul_(multiplier)


def storage_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as "bf16"."""
    if name not in STORAGE:
        raise UnknownNameError("storage", name, STORAGE)
    return STORAGE[name]


def token_chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Slices of the token axis with at most `CHUNK_VALUES` logits each."""
    step = max(1, CHUNK_VALUES // vocab)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


@dataclass(frozen=True)
class Tail:
    """Statistics over tokens, None if there are none; nonfinite values are only counted."""

    mean: float | None
    median: float | None
    p99: float | None
    maximum: float | None
    nonfinite: int = 0


class TailTally:
    """Collects a per-token quantity, chunk by chunk."""

    def __init__(self) -> None:
        self._parts: list[Array] = []

    def update(self, values_T: Tensor) -> None:
        self._parts.append(values_T.cpu().numpy())

    def tail(self) -> Tail:
        values = np.concatenate([np.empty(0), *self._parts])
        known = finite(values)
        return Tail(
            mean=mean(known),
            median=quantile(known, 0.5),
            p99=quantile(known, 0.99),
            maximum=float(known.max()) if known.size else None,
            nonfinite=values.size - known.size,
        )
