"""What happens to logits between the projection and the softmax: they are stored, and read back.

Axes: T tokens (C of a chunk), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.implementation.config import Storage as Storage
from zloss.errors import UnknownNameError
from zloss.models.output_head import OutputHead

STORAGE: dict[Storage, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CHUNK_VALUES = 1 << 22
"""Entries of a chunk of logits: 32 MB in fp64, of which a measurement keeps about ten at a time."""


def storage_dtype(name: str) -> torch.dtype:
    """The dtype behind a name."""
    if name not in STORAGE:
        raise UnknownNameError("storage", name, STORAGE)
    return STORAGE[name]


def token_chunks(tokens: int, vocab: int) -> Iterator[slice]:
    """Slices of the token axis whose logits are not too many at once."""
    step = max(1, CHUNK_VALUES // vocab)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


@dataclass(frozen=True)
class ReferenceHead:
    """The head in fp64, from its parameters as they are: the truth before any storage."""

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
