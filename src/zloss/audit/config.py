"""The configurations of both audits of a model, of a checkpoint and of an implementation, without torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

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
    check_measured_coef,
    check_numbers,
    check_optional_counts,
    check_seed,
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
    """λ_diag, the coefficient at which Diag Z and the gradients are measured."""
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
        check_measured_coef("diag_coef", self.diag_coef)
        check_seed(self.seed)
        check_measured_coef("coef", self.coef, zero=True)
        check_numbers(self, ("gain_beta",))
        if self.target is not None and not (isinstance(self.target, (int, float)) and abs(self.target) <= 1e6):
            raise InputError(f"`target` is expected to be a number between -1e6 and 1e6, but got {self.target!r}.")
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


StoragePrecision = Literal["bf16", "fp16", "both", "fp32"]
"""How the training stack stores logits; "both" audits the two 16-bit dtypes."""
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
        check_measured_coef("coef", self.coef)
        check_choices(self, {"bos": BosPolicy, "precision": StoragePrecision, "autocast": Literal["fp32", "bf16"]})
        if not self.logit_scales or not all(math.isfinite(scale) and scale > 0 for scale in self.logit_scales):
            raise InputError(f"`logit_scales` are expected to be finite numbers > 0, but got {self.logit_scales!r}.")
        if not self.methods:
            raise InputError("`methods` is expected to name at least one method, and to include ce as the reference.")

    @property
    def storages(self) -> tuple[LogitStorage, ...]:
        """The dtypes in which logits are stored."""
        return ("bf16", "fp16") if self.precision == "both" else (self.precision,)
