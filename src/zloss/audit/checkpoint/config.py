"""The configuration of an audit, without torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

from zloss.errors import InputError
from zloss.results.options import (
    SMOLLM2,
    BosPolicy,
    DeviceMap,
    DtypeName,
    LogitStorage,
    Option,
    SvdMethod,
    TextOptions,
    check_choices,
    check_counts,
    check_numbers,
    check_optional_counts,
)

NOT_OF_THE_PASS = (
    *("texts", "corpus", "text_field", "gradient_blocks", "device_map", "allow_pickle"),
    *("coef", "target", "logits", "router_coef", "router_convention"),
)
"""Settings that change no column of the token table."""


@dataclass(frozen=True)
class AuditConfig(TextOptions):
    """A checkpoint, a text, and how to measure them."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    offset: int = 0
    """Blocks to skip at the start of the text."""
    valid_vocab: Annotated[int | str | None, Option(metavar="N|tokenizer")] = None
    """Rows of the head that are included in log Z, μ, w̄ and c: a number, or 'tokenizer' for the tokenizer's length.
    Default: all."""
    diag_coef: float = 1e-4
    """λ_diag of Diag Z and of the gradient section."""
    gain_beta: float = 1e-2
    """β of the gain-aware penalty whose effect is estimated: its weight is 1/(1 + β A²)."""
    coef: float = 1e-4
    """λ of the Z-loss you train with, or plan to; the verdict says what it would do to this model."""
    target: float | None = None
    """c of that Z-loss; most frameworks use 0. Default: log V."""
    logits: LogitStorage = "bf16"
    """Precision in which your training stack stores its logits."""
    router_coef: float | None = None
    """λ_R of your router Z-loss, for a model with routers. Default: none, and the verdict does not cover routers."""
    router_convention: Annotated[str, Option(metavar="NAME")] = "token_layer_mean"
    """Convention that `router_coef` follows: token_layer_mean, megatron, olmoe, ..."""
    svd: SvdMethod = "exact"
    """Spectrum of the head: exact from the Gram matrix, or randomized as in the paper."""
    gradient_blocks: int = 8
    """Blocks of the diagnostic batch of the gradient section; 0 skips it."""
    batch_blocks: int = 4
    """Blocks per forward pass."""
    dtype: DtypeName = "fp32"
    """Precision of the model; statistics are always fp32 or better."""
    seed: int = 0
    """Seed of the token sample and of a randomized spectrum."""
    device_map: DeviceMap | None = None
    """`auto` places the layers on all devices and offloads the rest to memory and disk, with accelerate, for a model that does
    not fit on one device. If weights are offloaded, the gradient section and the routers are left out."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    allow_pickle: bool = False
    """Also read pickled weights."""

    def __post_init__(self) -> None:
        check_numbers(self, ("diag_coef",), positive=True)
        check_numbers(self, ("gain_beta", "coef"))
        if self.target is not None and not (isinstance(self.target, (int, float)) and math.isfinite(self.target)):
            raise InputError(f"`target` is expected to be a finite number, but got {self.target!r}.")
        if self.router_coef is not None:
            check_numbers(self, ("router_coef",))
        check_counts(self, ("batch_blocks",))
        check_counts(self, ("gradient_blocks", "offset"), least=0)
        check_optional_counts(self, ("blocks", "block_size"))
        check_choices(self, {"bos": BosPolicy, "svd": SvdMethod, "dtype": DtypeName, "logits": LogitStorage})

    def fingerprint(self, tokens: str) -> str:
        """Identity of the pass over the text: the settings that change its numbers, and the tokens themselves."""
        fields = asdict(self)
        for irrelevant in NOT_OF_THE_PASS:
            fields.pop(irrelevant)
        return hashlib.sha256((json.dumps(fields, sort_keys=True) + tokens).encode()).hexdigest()[:16]
