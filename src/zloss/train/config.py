"""Everything that defines a training run, as one typed value; a run is a function of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from zloss.errors import InputError, UnknownNameError
from zloss.models.checkpoint import SMOLLM2, BosPolicy
from zloss.source.objective import Objective
from zloss.source.objectives.registry import make_objective, objective_names
from zloss.train.moe.config import MoeRun

Precision = Literal["fp32", "bf16"]
HeadKind = Literal["fused", "paper"]
Decay = Literal["matrices", "all"]

FREE = ("method", "coef", "target", "gain_beta")
"""Fields in which the runs of a matched pair may differ; every other field defines the experiment."""
UNPENALIZED = ("ce", "centered-head")
"""Methods without a coefficient: theirs is 0, so one run serves every coefficient of a sweep."""


@dataclass(frozen=True)
class TrainConfig:
    """One run. The defaults are the paper's recipe (β, decay, clipping), at a scale that fits two cores."""

    model: str = SMOLLM2
    """A checkpoint by name; with `from_config` only a label."""
    from_config: str | None = None
    """A small model from scratch: a name of `train.from_config.SHAPES` or a JSON file in the Hugging Face format."""
    train_tokenizer: int | None = None
    """Vocabulary of a byte-level BPE to train on the training text, for a model from scratch."""
    untie: bool = False
    """Give the output head a table of its own, equal to the input table at the start."""
    head_shift: float = 0.0
    """Shift the untied head until p99 |μ| is about this on the first training blocks: CE stays, a controlled probe."""

    method: str = "ce"
    coef: float = 0.0
    target: float | None = None
    """c (of the relative part for factorized); None is log V."""
    gain_beta: float = 1e-2
    seed: int = 1

    texts: tuple[str, ...] = ()
    corpus: str | None = None
    text_field: str = "text"
    blocks: int | None = None
    """Training blocks; None: all the text gives (less the validation blocks where both come from one text)."""
    offset: int = 0
    valid_texts: tuple[str, ...] = ()
    """None given: the validation blocks come from the training text, behind the training blocks."""
    valid_blocks: int = 64
    valid_offset: int | None = None
    block_size: int = 256
    bos: BosPolicy = "auto"

    steps: int = 200
    warmup: int = 20
    lr: float = 5e-5
    lr_floor: float = 0.0
    """Smallest learning rate of the cosine, as a share of `lr`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Decay = "matrices"
    """Which parameters decay: tensors of two dimensions and more, or all."""
    clip: float = 1.0
    micro_batch: int = 4
    """Blocks per forward and backward pass."""
    accumulate: int = 1
    """Passes per optimizer step."""
    precision: Precision = "fp32"
    """bf16: autocast; the weights stay fp32 in either case."""
    head: HeadKind = "fused"

    adam_every: int = 50
    thresholds: tuple[float, ...] = (10.0, 50.0, 100.0)
    spike: float = 0.5
    diag_coef: float = 1e-4
    gradient_blocks: int = 8

    moe: MoeRun | None = None
    """A mixture of experts from scratch instead of `model`, with its router loss; None: a dense run."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch", "accumulate", "block_size", "valid_blocks", "adam_every"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` is expected to be at least 1, but got {getattr(self, name)!r}.")
        for name in ("warmup", "offset", "gradient_blocks", "weight_decay", "coef", "head_shift", "gain_beta", "seed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InputError(f"`{name}` is expected to be a finite number ≥ 0, but got {getattr(self, name)!r}.")
        for name in ("lr", "clip", "eps", "diag_coef"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InputError(f"`{name}` is expected to be a finite number > 0, but got {getattr(self, name)!r}.")
        if self.target is not None and not math.isfinite(self.target):
            raise InputError(f"`target` is expected to be a finite number, but got {self.target!r}.")
        if self.train_tokenizer is not None and self.train_tokenizer < 1:
            raise InputError(f"--train-tokenizer is expected to be at least 1, but got {self.train_tokenizer!r}.")
        if self.warmup >= self.steps:
            raise InputError(
                f"`warmup` is expected to be shorter than the run, but got {self.warmup} of {self.steps} steps."
            )
        for kind, value, known in (
            ("precision", self.precision, get_args(Precision)),
            ("head", self.head, get_args(HeadKind)),
            ("decay", self.decay, get_args(Decay)),
            ("method", self.method, objective_names()),
        ):
            if value not in known:
                raise UnknownNameError(kind, value, known)
        if self.head_shift and not self.untie:
            raise InputError("`head_shift` needs `untie`: a tied head shares its rows with the input embedding.")
        if self.train_tokenizer is not None and self.from_config is None and self.moe is None:
            raise InputError("--train-tokenizer is for a model from scratch: give --from-config as well.")
        if self.moe is not None and self.from_config is not None:
            raise InputError("--moe builds its own model: leave --from-config out.")
        if self.method in UNPENALIZED and self.coef:
            raise InputError(f"{self.method} has no penalty, so its coefficient is 0, but got {self.coef!r}.")

    @property
    def pretrained(self) -> bool:
        """Whether the run starts from the weights of a checkpoint, not from its seed."""
        return self.from_config is None and self.moe is None

    @property
    def blocks_per_step(self) -> int:
        return self.micro_batch * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        return self.blocks_per_step * self.block_size

    @property
    def name(self) -> str:
        """The folder of the run: method, coefficient, seed; with experts the router variant, and a method beyond CE."""
        method = f"{self.method}-{self.coef:g}"
        if self.moe is not None:
            method = self.moe.name if self.method == "ce" else f"{self.moe.name}-{method}"
        return f"{method}-s{self.seed}"

    def objective(self) -> Objective:
        """The objective with its coefficient, target and β."""
        made: Any = make_objective(self.method, self.coef)
        own = {f.name for f in fields(made)}
        changes: dict[str, Any] = {}
        if self.target is not None:
            changes |= {name: self.target for name in ("target", "relative_target") if name in own}
        if "beta" in own:
            changes["beta"] = self.gain_beta
        objective: Objective = replace(made, **changes) if changes else made
        return objective

    def lr_at(self, step: int) -> float:
        """Linear warm-up over the first `warmup` steps, then a cosine that would reach the floor one step after the last."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup - 1) / (self.steps - self.warmup)
        return self.lr * (self.lr_floor + (1 - self.lr_floor) * 0.5 * (1 + math.cos(math.pi * progress)))
