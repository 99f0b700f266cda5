"""Everything that defines a training run, as one typed value; a run is a function of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from zloss.errors import InputError
from zloss.results.checks import check_choices, check_counts, check_numbers, check_optional_counts
from zloss.results.choices import SMOLLM2, BosPolicy, Decay, HeadKind, Precision
from zloss.results.moe_config import MoeRun
from zloss.results.option import NotAnOption, Option
from zloss.results.text_options import BlockCount, TextFiles, TextOptions, ValidTextFiles

FREE = ("method", "coef", "target", "gain_beta")
"""Fields in which the runs of a matched pair may differ; every other field defines the experiment."""
UNPENALIZED = ("ce", "centered-head")
"""Methods without a coefficient: theirs is 0, so one run serves every coefficient of a sweep."""


def run_name(method: str, coef: float, seed: int, router: str | None = None) -> str:
    """The folder of a run: method, coefficient, seed; with experts the `router` variant, and a method other than CE."""
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
    """Give the output head a table of its own, equal to the input table at the start."""
    head_shift: float = 0.0
    """Shift the untied head until p99 |μ| on the first training blocks is about this, in nats; cross-entropy does not
    change. A controlled probe."""

    method: Annotated[str, NotAnOption] = "ce"
    """Name of a registered objective."""
    coef: Annotated[float, NotAnOption] = 0.0
    """λ of the method."""
    target: float | None = None
    """Target c of the log-normalizer (of its relative part for factorized), in nats. Default: log V."""
    gain_beta: float = 1e-2
    """β of gain-aware: its weight is 1/(1 + β A²)."""
    seed: Annotated[int, NotAnOption] = 1
    """Seed of the order of the data, of dropout, and of the weights of a model from scratch."""

    texts: TextFiles = ()
    """Text to train on: plain text, .jsonl or .parquet; repeat to append. Default: the corpus `pydoc`."""
    blocks: BlockCount = None
    """Training blocks; 0 takes all the text gives, less the validation blocks where both come from one text."""
    offset: int = 0
    """Blocks to skip at the start of the training text."""
    valid_texts: ValidTextFiles = ()
    """Text to validate on; repeat to append. Default: blocks of the training text that are not trained on."""
    valid_blocks: int = 64
    """Validation blocks."""
    valid_offset: int | None = None
    """First validation block. Default: right behind the training blocks, or the start of `valid_texts`."""

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
    """What decays: matrices and tables, or every parameter."""
    clip: float = 1.0
    """Threshold of the gradient norm above which it is clipped."""
    micro_batch: int = 4
    """Blocks per forward and backward pass."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step."""
    precision: Precision = "fp32"
    """bf16 autocast or fp32; the weights are fp32 in either case."""
    head: HeadKind = "fused"
    """fused: logits are never kept. paper: materialised logits in the autocast dtype, centered by their fp32 shift."""

    optimizer_state: Annotated[str | None, Option(metavar="FILE")] = None
    """State of Adam to go on from (`optimizer.pt` of transformers, or a saved `state_dict`). Default: a fresh one."""

    adam_every: int = 50
    """Steps between two samples of the Adam state."""
    thresholds: Annotated[tuple[float, ...], Option(metavar="X,X,...", comma_separated=True)] = (10.0, 50.0, 100.0)
    """Thresholds τ of the event rates Φ_τ: the share of steps whose gradient norm before clipping exceeds τ."""
    spike: float = 0.5
    """Rise of the loss from one step to the next that counts as a spike, in nats."""
    diag_coef: float = 1e-4
    """λ_diag of Diag Z and of the gradient section."""
    gradient_blocks: int = 8
    """Validation blocks of the gradient section; 0 leaves it out."""

    moe: Annotated[MoeRun | None, Option(switch="a mixture of experts")] = None
    """Train a small mixture of experts from scratch (OLMoE: 4 blocks, width 256, 8 experts, tied) instead of `model`."""

    def __post_init__(self) -> None:
        check_counts(self, ("steps", "micro_batch", "accumulate", "valid_blocks", "adam_every"))
        check_optional_counts(self, ("blocks", "block_size"))
        check_counts(self, ("warmup", "offset", "gradient_blocks", "seed"), least=0)
        if self.valid_offset is not None:
            check_counts(self, ("valid_offset",), least=0)
        check_numbers(self, ("weight_decay", "coef", "head_shift", "gain_beta", "lr_floor", "spike"))
        check_numbers(self, ("lr", "clip", "eps", "diag_coef"), positive=True)
        check_choices(self, {"bos": BosPolicy, "precision": Precision, "head": HeadKind, "decay": Decay})
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"`{name}` is expected to be a number from 0 to below 1, but got {getattr(self, name)!r}."
                )
        if not all(math.isfinite(threshold) and threshold >= 0 for threshold in self.thresholds):
            raise InputError(f"`thresholds` are expected to be finite numbers ≥ 0, but got {list(self.thresholds)!r}.")
        if self.target is not None and not math.isfinite(self.target):
            raise InputError(f"`target` is expected to be a finite number, but got {self.target!r}.")
        if self.train_tokenizer is not None:
            check_counts(self, ("train_tokenizer",))
            if self.pretrained:
                raise InputError("`train_tokenizer` is for a model from scratch: give `from_config` as well.")
        if self.warmup >= self.steps:
            raise InputError(
                f"`warmup` is expected to be shorter than the run, but got {self.warmup} of {self.steps} steps."
            )
        if self.head_shift and not self.untie:
            raise InputError("`head_shift` needs `untie`: a tied head shares its rows with the input embedding.")
        if self.moe is not None and self.from_config is not None:
            raise InputError("`moe` builds its own model: leave `from_config` out.")
        if self.method in UNPENALIZED and self.coef:
            raise InputError(f"{self.method} has no penalty, so its coefficient is 0, but got {self.coef!r}.")

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
                "`block_size` is not known before the model is: give one, or take that of the run's blocks."
            )
        return self.blocks_per_step * self.block_size

    @property
    def name(self) -> str:
        """The folder of the run: method, coefficient, seed; with experts the router variant, and a method beyond CE."""
        return run_name(self.method, self.coef, self.seed, None if self.moe is None else self.moe.name)

    def lr_at(self, step: int) -> float:
        """Linear warm-up over the first `warmup` steps, then a cosine that would reach the floor one step after the last."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        progress = (step - self.warmup - 1) / (self.steps - self.warmup)
        return self.lr * (self.lr_floor + (1 - self.lr_floor) * 0.5 * (1 + math.cos(math.pi * progress)))
