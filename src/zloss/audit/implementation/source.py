"""Source audit: the error of the Z source rebuilt from stored logits, while the scalar loss looks right.

For every token, with ẑ = z rounded to its storage and the statistics of ẑ read back:

    forward error   |L̂ − L| / L                          L = λ(log Z − c)², per token and summed over a block
    Δ_src           ‖δ̂ − δ‖₂ / ‖δ‖₂                      δ = 2λ(log Z − c)p          (paper eq:backward_deltas)
    δ̂ − δ  =  2λ( ε_Z p  +  (log Z − c) ε_p  +  ε_Z ε_p )                            (paper eq:source_mismatch)

The truth is fp64. λ cancels in every ratio. Axes: C tokens of a chunk, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zloss.errors import UnknownNameError
from zloss.head.source import z_loss_source
from zloss.measure.tokens import Array, finite, mean, quantile
from zloss.models.output_head import OutputHead
from zloss.results.implementation_audit import StoredLogits
from zloss.results.options import LogitStorage
from zloss.tensors import at_least_fp32

STORAGE: dict[LogitStorage, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CHUNK_VALUES = 1 << 22
"""Entries of a chunk of logits: 32 MB in fp64; a measurement keeps about ten such tensors at a time."""
Statistics = Literal["fp32", "storage"]
"""Where log Ẑ and p̂ live: accumulated and kept in fp32, or rounded to the storage dtype themselves."""
TINY = torch.finfo(torch.float64).tiny


@torch.no_grad()
def source_audit(
    head: OutputHead,
    hidden_TD: Tensor,
    *,
    block_size: int,
    storages: Sequence[LogitStorage] = ("fp32", "bf16", "fp16"),
    logit_scales: Sequence[float] = (1, 2, 4),
    coef: float = 1e-4,
    target: float,
    statistics: Statistics = "fp32",
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[SourceLine, ...]:
    """One line per storage and logit multiplier, on the logits of `hidden_TD`: blocks of `block_size` tokens in a row.

    `advance` receives the number of tokens of each finished chunk.
    """
    reference = fp64_head(head)
    chunks: dict[tuple[LogitStorage, float], list[SourceErrors]] = {
        (storage, scale): [] for storage in storages for scale in logit_scales
    }
    blocks: list[int] = []
    for block, block_BD in enumerate(torch.split(hidden_TD, block_size)):
        for chunk in token_chunks(len(block_BD), head.vocab):
            z_CV = reference.logits(block_BD[chunk].double())
            for (storage, scale), found in chunks.items():
                scaled_CV = z_CV * scale
                stored_CV = scaled_CV.to(storage_dtype(storage))
                found.append(source_errors(scaled_CV, stored_CV, coef, target, statistics=statistics))
            blocks.append(block)
            advance(len(z_CV))
    return tuple(_source_line(*key, found, blocks, statistics, target) for key, found in chunks.items())


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


def _source_line(
    storage: str,
    logit_scale: float,
    chunks: Sequence[SourceErrors],
    blocks: Sequence[int],
    statistics: Statistics,
    target: float,
) -> SourceLine:
    """One line from the errors of all chunks; `blocks` has the block of every chunk."""
    value_B, value_got_B = np.zeros(blocks[-1] + 1), np.zeros(blocks[-1] + 1)
    for block, chunk in zip(blocks, chunks, strict=True):
        value_B[block] += float(chunk.value_C.sum())
        value_got_B[block] += float(chunk.value_got_C.sum())
    value, value_got, residual = (
        torch.cat([getattr(chunk, name) for chunk in chunks]) for name in ("value_C", "value_got_C", "residual_C")
    )
    source = joined_errors([chunk.source for chunk in chunks])
    terms = {name: torch.cat([chunk.terms[name] for chunk in chunks]) for name in chunks[0].terms}
    return SourceLine(
        storage=storage,
        logit_scale=logit_scale,
        statistics=statistics,
        tokens=len(value),
        target=target,
        forward_scalar=mean(finite(abs(value_got_B - value_B) / np.maximum(value_B, TINY))),
        forward=tail((value_got - value).abs() / value.clamp_min(TINY)),
        delta_src=tail(source.delta),
        delta_src_all=source.whole,
        cosine=tail(source.cosine).mean,
        terms={name: tail(norm / source.want.clamp_min(TINY)).mean for name, norm in terms.items()},
        residual=math.sqrt(residual.square().sum() / source.want.square().sum().clamp_min(TINY)),
    )


@dataclass(frozen=True)
class SourceErrors:
    """Per token of a chunk, fp64."""

    value_C: Tensor
    """L, the true penalty."""
    value_got_C: Tensor
    """L̂, the penalty of the stored logits."""
    source: VectorErrors
    """δ̂ against δ."""
    terms: dict[str, Tensor]
    """Norms of the three terms of the identity, in the order ε_Z, ε_p, product."""
    residual_C: Tensor
    """‖(δ̂ − δ) − sum of the three terms‖₂: the remainder of the identity."""


@torch.no_grad()
def source_errors(
    z_CV: Tensor, stored_CV: Tensor, coef: float, target: float, *, statistics: Statistics = "fp32"
) -> SourceErrors:
    """Compare the source that an implementation would form from `stored_CV` with the source of the fp64 logits `z_CV`."""
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
    source = vector_errors(source_got_CV, source_CV)
    left_CV = source_got_CV - source_CV
    terms = {}
    for name, factor_C, shape_CV in (
        ("epsilon_z", epsilon_z_C, p_CV),
        ("epsilon_p", violation_C, epsilon_p_CV),
        ("product", epsilon_z_C, epsilon_p_CV),
    ):
        term_CV = shape_CV * (2 * coef * factor_C).unsqueeze(1)
        terms[name] = term_CV.norm(dim=-1)
        left_CV -= term_CV
    return SourceErrors(coef * violation_C**2, value_got_C, source, terms, left_CV.norm(dim=-1))


# What the source audit shares with the audits of kernels and gradients.


@dataclass(frozen=True)
class VectorErrors:
    """n measured vectors against n true ones, fp64 [n]. "Whole": all of them as one vector, Frobenius norms."""

    error: Tensor
    """‖got − want‖₂."""
    want: Tensor
    """‖want‖₂."""
    got: Tensor
    """‖got‖₂."""
    dot: Tensor
    """⟨got, want⟩."""

    @property
    def delta(self) -> Tensor:
        """Relative error of every vector."""
        return self.error / self.want.clamp_min(TINY)

    @property
    def cosine(self) -> Tensor:
        return self.dot / (self.want * self.got).clamp_min(TINY)

    @property
    def whole(self) -> float:
        """Relative error of the whole."""
        return math.sqrt(self.error.square().sum() / self.want.square().sum().clamp_min(TINY))

    @property
    def whole_cosine(self) -> float:
        norms = (self.want.square().sum() * self.got.square().sum()).sqrt()
        return float(self.dot.sum() / norms.clamp_min(TINY))


def vector_errors(got_NX: Tensor, want_NX: Tensor) -> VectorErrors:
    """Row by row."""
    got_NX, want_NX = got_NX.double(), want_NX.double()
    return VectorErrors(
        error=(got_NX - want_NX).norm(dim=-1),
        want=want_NX.norm(dim=-1),
        got=got_NX.norm(dim=-1),
        dot=(got_NX * want_NX).sum(dim=-1),
    )


def joined_errors(parts: Sequence[VectorErrors]) -> VectorErrors:
    """The vectors of all parts."""
    return VectorErrors(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("error", "want", "got", "dot"))
    )


@dataclass(frozen=True)
class Tail:
    """Statistics over tokens, None if there are none; nonfinite values are only counted."""

    mean: float | None
    median: float | None
    p99: float | None
    maximum: float | None
    nonfinite: int = 0


def tail(values_T: Tensor) -> Tail:
    """The statistics of a per-token quantity."""
    values: Array = values_T.cpu().numpy()
    known = finite(values)
    largest = float(known.max()) if known.size else None
    return Tail(mean(known), quantile(known, 0.5), quantile(known, 0.99), largest, values.size - known.size)


def fp64_head(head: OutputHead) -> OutputHead:
    """The head with its parameters in fp64; its logits of fp64 hidden states are the reference before any storage."""
    bias_V = None if head.bias_V is None else head.bias_V.detach().double()
    return replace(head, weight_VD=head.weight_VD.detach().double(), bias_V=bias_V)


def storage_dtype(name: str) -> torch.dtype:
    """The dtype named by a string such as "bf16"."""
    if name not in STORAGE:
        raise UnknownNameError("storage", name, STORAGE)
    return STORAGE[name]


def token_chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Slices of the token axis with at most `CHUNK_VALUES` logits each."""
    step = max(1, CHUNK_VALUES // vocab)
    for start in range(0, tokens, step):
        yield slice(start, start + step)
