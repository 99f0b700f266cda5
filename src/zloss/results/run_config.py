"""The configuration of a training run: the options of `zloss train`, config.json, and what a recorded run must state.

A run is a function of its configuration. In config.json its fields are at the top level; texts and models are named by the
last part of their path, and checksums identify them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from zloss.errors import InputError, UnknownNameError
from zloss.results.options import (
    SMOLLM2,
    BlockCount,
    BosPolicy,
    Decay,
    HeadKind,
    NotAnOption,
    Option,
    Precision,
    TextOptions,
    ValidTextFiles,
    check_choices,
    check_counts,
    check_measured_coef,
    check_numbers,
    check_optional_counts,
    check_seed,
    refuse,
)
from zloss.results.provenance import without_folders
from zloss.results.record import ResultRecord, flat, written_with

PAPER_CONVENTIONS = ("token_layer_mean", "active_route_mean", "active_route_sum")
"""Conventions whose reduction is trained as the paper writes it, route by route (`zloss.train.moe`)."""
REFERENCE = "token_layer_mean"
"""The convention that a matched variant is converted to agree with."""
OFF, MATCHED = "none", "matched"
FREE_MOE = ("moe.router", "moe.router_coef")
"""Fields in which the runs of a matched pair may differ, as config.json names them."""


@dataclass(frozen=True)
class MoeRun:
    """A small mixture of experts from scratch; the defaults are the paper's where it states them."""

    top_k: int = 4
    """Experts k that every token of the `moe` model is sent to."""
    experts: int = 8
    """Experts E in every layer of the `moe` model."""
    layers: Annotated[int, Option(flag="moe-layers")] = 4
    """Transformer blocks of the `moe` model; each has a router."""
    width: Annotated[int, Option(flag="moe-width")] = 256
    """Width of the `moe` model, in features; a multiple of `heads`."""
    heads: Annotated[int, Option(flag="moe-heads")] = 4
    """Attention heads of every block of the `moe` model."""
    expert_width: int = 512
    """Width of the hidden layer of an expert, in features; the paper does not state it."""
    tokenizer: Annotated[str | None, NotAnOption] = None
    """Tokenizer of the `moe` model, a Hugging Face name or folder. By default one is trained, see `train_tokenizer`."""
    load_balance: float = 1e-2
    """Coefficient of the load-balancing loss of the `moe` model; that loss is about k at balance, not 1."""
    router: Annotated[str, NotAnOption] = OFF
    """Router Z-loss: `none`, a convention of the paper, or `convention:matched` with the coefficient converted so that
    s_rel is 1."""
    router_coef: Annotated[float, NotAnOption] = 0.0
    """λ_R as written; a matched variant converts it (`zloss.train.moe.applied_coef`)."""
    router_target: float | None = None
    """Target c_R of the router log-normalizer, in nats. Default: log E."""
    capacity_factor: float | None = None
    """Capacity of an expert in units of its fair share T·k/E. Routes beyond it are counted and not dropped: OLMoE has no
    capacity. By default nothing is counted."""

    def __post_init__(self) -> None:
        check_counts(self, ("top_k", "experts", "layers", "width", "heads", "expert_width"))
        check_numbers(self, ("load_balance", "router_coef"))
        if self.capacity_factor is not None:
            check_numbers(self, ("capacity_factor",), positive=True)
        if self.router not in variants():
            raise UnknownNameError("router variant", self.router, variants())
        of_a_head = self.width / self.heads
        refuse(
            (
                self.top_k > self.experts,
                f"`top_k` is expected to be at most {self.experts}, the number of experts, but got {self.top_k}.",
            ),
            (
                self.width % self.heads,
                f"`width` is expected to be a multiple of `heads` = {self.heads}, but got {self.width}.",
            ),
            (
                of_a_head % 2,
                "the width of an attention head is expected to be even (rotary embedding), but "
                f"{self.width} / {self.heads} is {of_a_head:g}.",
            ),
            (
                self.router == OFF and self.router_coef,
                f"the router variant `none` has no penalty: its coefficient is 0, not {self.router_coef!r}.",
            ),
            (
                self.router_target is not None and not math.isfinite(self.router_target),
                f"`router_target` is expected to be a finite number, but got {self.router_target!r}.",
            ),
        )

    @property
    def convention(self) -> str | None:
        """The convention of the paper that this variant trains under; None when off."""
        return None if self.router == OFF else self.router.partition(":")[0]

    @property
    def matched(self) -> bool:
        """Whether the coefficient is converted so that s_rel is 1."""
        return self.router.endswith(f":{MATCHED}")


def router_name(router: str, coef: float) -> str:
    """A router variant and its coefficient as part of a folder name."""
    return f"{router.replace(':', '-')}-{coef:g}"


def variants() -> tuple[str, ...]:
    """Every router variant there is."""
    return (OFF, *(name for c in PAPER_CONVENTIONS for name in (c, f"{c}:{MATCHED}")))


FREE = ("method", "coef", "coef_until", "target", "gain_beta")
"""Fields in which the runs of a matched pair may differ; every other field defines the experiment."""
MU_LOSS, MU_CENTERING = "mu-loss", "mu-centering"
"""Methods that act on the mean row of the head and not on tokens: `zloss.mu_loss_` with γ = coef, and `zloss.mu_center_`."""
UNPENALIZED = ("ce", "centered-head", MU_CENTERING)
"""Methods without a coefficient: theirs is 0, so one run serves every coefficient of a sweep."""


def run_name(method: str, coef: float, seed: int, router: str | None = None) -> str:
    """Folder name of a run: method, coefficient, seed; a mixture of experts adds the `router` variant and omits CE."""
    named = f"{method}-{coef:g}"
    if router is not None:
        named = router if method == "ce" else f"{router}-{named}"
    return f"{named}-s{seed}"


@dataclass(frozen=True)
class TrainConfig(TextOptions):
    """One run. The defaults are the paper's recipe (Adam's β, decay, clipping), at a scale that fits two cores."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    from_config: Annotated[str | None, Option(metavar="NAME|FILE")] = None
    """A model from scratch instead of `model`: tiny (0.4 M parameters), small (10 M), or a Hugging Face config file."""
    train_tokenizer: Annotated[int | None, Option(metavar="N")] = None
    """Entries of the byte-level BPE tokenizer that is trained on the training text for a model from scratch.
    Default: 4096."""
    untie: bool = False
    """Untie the output head: give it a separate table, initialized to the input table."""
    tokenizer: Annotated[str | None, Option(metavar="PATH")] = field(default=None, metadata=written_with("tokenizer"))
    """Folder or Hugging Face id whose tokenizer is used instead of the model's, such as for a checkpoint saved without one; a
    model from scratch uses it instead of training one."""
    head_shift: float = 0.0
    """Shift the untied head until p99 |μ| on the first training blocks is about this, in nats; cross-entropy does not
    change. For experiments on large common shifts."""

    method: Annotated[str, NotAnOption] = "ce"
    """Name of a registered objective, or `mu-loss` or `mu-centering`."""
    coef: Annotated[float, NotAnOption] = 0.0
    """λ of the method; γ of mu-loss."""
    coef_until: Annotated[int | None, Option(metavar="STEP")] = field(default=None, metadata=written_with("coef_until"))
    """λ is 0 from this optimizer step on: the run then trains as CE. steps.jsonl has the λ of every step and, as
    `z_unscaled`, the penalty for λ = 1. Default: λ stays on."""
    target: float | None = None
    """Target c of the log-normalizer (of its relative part for factorized), in nats. Default: log V."""
    gain_beta: float = 1e-2
    """β of gain-aware: its weight is 1/(1 + β A²)."""
    seed: Annotated[int, NotAnOption] = 1
    """Seed of the order of the data, of dropout, and of the weights of a model from scratch."""

    blocks: BlockCount = None
    """Training blocks; 0 uses the whole text, less the validation blocks where both come from one text."""
    offset: int = 0
    """Blocks to skip at the start of the training text."""
    valid_texts: ValidTextFiles = ()
    """Text to validate on; repeat to append. Default: blocks of the training text that are not trained on."""
    valid_blocks: int = 64
    """Validation blocks."""
    valid_offset: int | None = None
    """First validation block. Default: right after the training blocks, or the start of `valid_texts`."""

    steps: int = 200
    """Optimizer steps."""
    warmup: int = 20
    """Steps of linear warm-up before the cosine."""
    lr: float = 5e-5
    """Peak learning rate."""
    lr_floor: float = 0.0
    """Learning rate at the end of the cosine, as a share of `lr`."""
    beta1: float = 0.9
    """β₁ of Adam, the decay of its first moment."""
    beta2: float = 0.95
    """β₂ of Adam, the decay of its second moment."""
    eps: float = 1e-8
    """ε of Adam, added to the root of its second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay, per unit of learning rate."""
    decay: Decay = "matrices"
    """Which parameters decay: matrices and tables, or all of them."""
    clip: float = 1.0
    """Gradient norm above which the gradient is clipped."""
    micro_batch: int = 4
    """Blocks per forward and backward pass."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step."""
    precision: Precision = "fp32"
    """bf16 autocast or fp32; the weights are fp32 in either case."""
    head: HeadKind = "fused"
    """fused: logits are never stored. paper: materialized logits in the autocast dtype, centered by their fp32 shift."""

    optimizer_state: Annotated[str | None, Option(metavar="FILE")] = field(
        default=None, metadata=written_with("optimizer_state")
    )
    """Adam state to start from (`optimizer.pt` from transformers, or a saved `state_dict`). Default: a fresh one."""

    adam_every: int = 50
    """Steps between samples of the Adam state."""
    thresholds: Annotated[tuple[float, ...], Option(metavar="X,X,...", comma_separated=True)] = (10.0, 50.0, 100.0)
    """Thresholds τ of the event rates Φ_τ: the share of steps whose gradient norm before clipping exceeds τ."""
    spike: float = 0.5
    """Rise of the loss from one step to the next that counts as a spike, in nats."""
    diag_coef: float = 1e-4
    """λ_diag, the coefficient at which Diag Z and the gradients are measured."""
    gradient_blocks: int = 8
    """Validation blocks of the gradient section; 0 skips it."""

    moe: Annotated[MoeRun | None, Option(switch="a mixture of experts")] = field(
        default=None, metadata=written_with("moe")
    )
    """Train a small mixture of experts from scratch (OLMoE: 4 blocks, width 256, 8 experts, tied) instead of `model`."""

    def __post_init__(self) -> None:
        check_counts(self, ("steps", "micro_batch", "accumulate", "valid_blocks", "adam_every"))
        check_optional_counts(self, ("blocks", "block_size"))
        check_counts(self, ("warmup", "offset", "gradient_blocks", "seed"), least=0)
        if self.valid_offset is not None:
            check_counts(self, ("valid_offset",), least=0)
        check_numbers(self, ("weight_decay", "coef", "head_shift", "gain_beta", "lr_floor", "spike"))
        check_numbers(self, ("lr", "clip", "eps"), positive=True)
        check_measured_coef("diag_coef", self.diag_coef)
        check_seed(self.seed)
        check_choices(self, {"bos": BosPolicy, "precision": Precision, "head": HeadKind, "decay": Decay})
        check_optional_counts(self, ("train_tokenizer", "coef_until"))
        refuse(
            *(
                (not 0 <= beta < 1, f"`{name}` is expected to be a number from 0 to below 1, but got {beta!r}.")
                for name, beta in (("beta1", self.beta1), ("beta2", self.beta2))
            ),
            (
                not all(math.isfinite(threshold) and threshold >= 0 for threshold in self.thresholds),
                f"`thresholds` are expected to be finite numbers ≥ 0, but got {list(self.thresholds)!r}.",
            ),
            (
                self.target is not None and not math.isfinite(self.target),
                f"`target` is expected to be a finite number, but got {self.target!r}.",
            ),
            (
                self.train_tokenizer is not None and self.pretrained,
                "`train_tokenizer` is for a model from scratch: pass `from_config` as well.",
            ),
            (
                self.warmup >= self.steps,
                f"`warmup` is expected to be shorter than the run, but got {self.warmup} of {self.steps} steps.",
            ),
            (
                self.head_shift and not self.untie,
                "`head_shift` needs `untie`: a tied head shares its rows with the input embedding.",
            ),
            (
                self.moe is not None and self.from_config is not None,
                "`moe` builds its own model: leave `from_config` out.",
            ),
            (
                self.method in UNPENALIZED and self.coef,
                f"{self.method} has no penalty, so its coefficient is 0, but got {self.coef!r}.",
            ),
        )

    @property
    def pretrained(self) -> bool:
        """Whether the run starts from the weights of a checkpoint, not from its seed."""
        return self.from_config is None and self.moe is None

    @property
    def blocks_per_step(self) -> int:
        """Blocks of one optimizer step."""
        return self.micro_batch * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Predictions of one optimizer step: the denominator of its loss."""
        if self.block_size is None:
            raise InputError(
                "`block_size` is unknown until the model is loaded: set it, or use the size of the run's blocks."
            )
        return self.blocks_per_step * self.block_size

    @property
    def name(self) -> str:
        """Folder name of the run: method, coefficient, seed; a mixture of experts adds the router variant and omits CE."""
        router = None if self.moe is None else router_name(self.moe.router, self.moe.router_coef)
        return run_name(self.method, self.coef, self.seed, router)

    def coef_at(self, step: int) -> float:
        """λ of a step: `coef`, and 0 from `coef_until` on."""
        return 0.0 if self.coef_until is not None and step >= self.coef_until else self.coef

    def lr_at(self, step: int) -> float:
        """Linear warm-up over the first `warmup` steps, then a cosine that would reach the floor one step after the last."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup - 1) / (self.steps - self.warmup)
        return self.lr * (self.lr_floor + (1 - self.lr_floor) * 0.5 * (1 + math.cos(math.pi * progress)))


CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class TextPart:
    """The blocks of one text that a run trains or validates on."""

    name: str
    """File names, or the name of a corpus."""
    blocks: int
    """Number of blocks."""
    offset: int
    """First block."""
    tokens: int
    """Predictions in all blocks."""
    fingerprint: str
    """Checksum of the token ids."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else identifies the text: files with size and checksum, or dataset and split."""


@dataclass(frozen=True)
class RunData:
    """Both texts of a run."""

    train: TextPart
    """The blocks that are trained on."""
    valid: TextPart
    """The blocks on which the trained model is measured."""


@dataclass(frozen=True)
class RunConfig(ResultRecord):
    """One config.json: the keys of `config` are at its top level.

    A dense run has no key `moe`, a fresh Adam no `optimizer_state`, the model's own tokenizer no `tokenizer`.
    """

    SCHEMA: ClassVar[str] = "zloss.train-config/1"

    config: TrainConfig = field(metadata=flat())
    """The configuration, with paths reduced to their last component."""
    data: RunData
    """Both texts."""
    initial_weights: str
    """Checksum of the pretrained weights; "seed" for weights that are drawn from the run's seed."""


def without_paths(config: TrainConfig) -> TrainConfig:
    """`config` with paths reduced to their last component, so that a result reveals nothing about the machine."""
    changes: dict[str, Any] = {
        "model": without_folders(config.model),
        "tokenizer": config.tokenizer and without_folders(config.tokenizer),
        "from_config": config.from_config and without_folders(config.from_config),
        "texts": tuple(Path(text).name for text in config.texts),
        "valid_texts": tuple(Path(text).name for text in config.valid_texts),
    }
    if (state := config.optimizer_state) is not None and Path(state).is_file():
        with Path(state).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        changes["optimizer_state"] = f"{Path(state).name} sha256:{digest[:16]}"
    if config.moe is not None and config.moe.tokenizer is not None:
        changes["moe"] = replace(config.moe, tokenizer=without_folders(config.moe.tokenizer))
    return replace(config, **changes)


FREE_RECORDED = ("objective", "initial_weights")
"""Keys, in addition to those in `FREE`, that may differ between recorded runs of one experiment."""


@dataclass(frozen=True)
class RecordedData:
    """Both texts of a recorded run."""

    valid: TextPart
    """The blocks on which the trained model is measured."""
    train: dict[str, Any] | None = None
    """What the training loop states about its training data; None if it states nothing."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun(ResultRecord):
    """One config.json."""

    SCHEMA: ClassVar[str] = "zloss.recorded-run/1"

    loop: str
    """What trained: the class of the trainer, or "plain loop"."""
    model: str
    """Class of the model."""
    method: str
    """Name of the objective, as on the command line."""
    coef: float
    """λ of the method; 0 without a penalty. Factorized: λ_rel."""
    target: float | None
    """Target of the log-normalizer; None is log V."""
    gain_beta: float
    """β of the gain-aware weight, for the method and for what is measured of every run."""
    objective: dict[str, Any]
    """Every number of the objective."""
    seed: int
    """Seed by which runs are paired."""
    clip: float | None
    """Threshold of the gradient norm; None if nothing is clipped."""
    settings: dict[str, Any]
    """Settings of the loop that define the experiment: learning rate, schedule, batch, precision, …"""
    measured: dict[str, Any]
    """Settings of the measurement: samples of Adam's state, blocks of the gradient section, λ_diag."""
    data: RecordedData
    """Both texts."""
    initial_weights: str
    """Checksum of all weights before the first step."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version of this file."""

    @property
    def name(self) -> str:
        """The folder of the run: method, coefficient and seed, as for `zloss train`."""
        return run_name(self.method, self.coef, self.seed)
