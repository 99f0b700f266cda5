"""The configuration of an implementation audit, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from zloss.errors import InputError
from zloss.results.options import (
    SMOLLM2,
    BosPolicy,
    Option,
    TextOptions,
    check_choices,
    check_counts,
    check_numbers,
    check_optional_counts,
)

StoragePrecision = Literal["bf16", "fp16", "both", "fp32"]
"""How the training stack stores logits; "both" audits the two 16-bit dtypes."""
Storage = Literal["fp32", "bf16", "fp16"]
NO_IMPLEMENTATION = "none"


@dataclass(frozen=True)
class ImplementationAuditConfig(TextOptions):
    """A checkpoint, a text, and which precisions, implementations and methods to audit on them."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    blocks: int = 4
    """Blocks of the source audit."""
    precision: StoragePrecision = "both"
    """Dtype in which the training stack stores logits; `both` audits bf16 and fp16."""
    logit_scales: Annotated[tuple[float, ...], Option(comma_separated=True, metavar="X,X,...")] = (1.0,)
    """Factors on the logits, for models whose logits are larger; the decision map reads factor 1."""
    implementations: Annotated[tuple[str, ...], Option(comma_separated=True, metavar="A,B,...")] = ()
    """Losses to run on these logits by name, or `none`. Default: every installed one except cut-cross-entropy, which
    takes minutes to compile."""
    implementation_tokens: int = 8
    """Evenly spaced tokens per block that go through every implementation."""
    update_blocks: int = 1
    """Blocks in the batch of the update audit; 0 skips it. It needs memory for three more copies of the model's weights."""
    overflow_blocks: int = 2
    """Blocks of the overflow audit, one batch each; 0 skips it."""
    methods: Annotated[tuple[str, ...], Option(comma_separated=True, metavar="A,B,...")] = (
        "ce",
        "standard",
        "centered",
    )
    """Methods of the overflow audit; their margins are compared with the margin of ce."""
    autocast: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass of the overflow audit; the paper's is bf16 autocast, which is slow on most CPUs."""
    coef: float = 1e-4
    """λ of every section."""
    device: str = "cpu"
    """Where the model runs: `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    allow_pickle: bool = False
    """Also read pickled weights."""

    def __post_init__(self) -> None:
        check_counts(self, ("blocks", "implementation_tokens"))
        check_optional_counts(self, ("block_size",))
        check_counts(self, ("update_blocks", "overflow_blocks"), least=0)
        check_numbers(self, ("coef",), positive=True)
        check_choices(self, {"bos": BosPolicy, "precision": StoragePrecision, "autocast": Literal["fp32", "bf16"]})
        if not self.logit_scales or not all(math.isfinite(scale) and scale > 0 for scale in self.logit_scales):
            raise InputError(f"`logit_scales` are expected to be finite numbers > 0, but got {self.logit_scales!r}.")
        if not self.methods:
            raise InputError("`methods` is expected to name at least one method, and to include ce as the reference.")

    @property
    def storages(self) -> tuple[Storage, ...]:
        """The dtypes in which logits are stored."""
        return ("bf16", "fp16") if self.precision == "both" else (self.precision,)
