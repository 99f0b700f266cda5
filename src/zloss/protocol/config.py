"""Settings of `zloss recommend`, `zloss drift` and `zloss center`, as typed values without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from zloss.audit.config import NO_IMPLEMENTATION, AuditConfig, ImplementationAuditConfig
from zloss.decide.recommend import LEAST_STEPS
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.options import (
    SMOLLM2,
    BlockCount,
    BosPolicy,
    DtypeName,
    LogitStorage,
    Option,
    TextChoice,
    TextOptions,
    ValidTextFiles,
    check_choices,
    check_counts,
    check_measured_coef,
    check_numbers,
    check_optional_counts,
    refuse,
)
from zloss.results.recommendation import Arm
from zloss.results.run_config import MU_LOSS, TrainConfig


@dataclass(frozen=True)
class CenterConfig(TextChoice):
    """What to center, and the text on which the copy is checked."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file (written in fp32)."""
    blocks: int = 16
    """Blocks of that text."""
    block_size: int | None = None
    """Predictions per block, in tokens. Default: 256, or fewer if the model has fewer positions."""
    keep_tied: bool = False
    """Keep a tied head tied, by moving the mean row into learned positions that are added to the embedding (GPT-2, OPT).
    Default: untie the copy."""
    valid_vocab: Annotated[int | str | None, Option(metavar="N|tokenizer")] = None
    """Rows that the mean row is averaged over, if the head has padding rows: a number, or 'tokenizer' for rows that have a
    token. Default: all."""
    logits: LogitStorage = "bf16"
    """Precision in which your stack stores its logits; the verdict is about their rounding."""
    shift_noise: float = Thresholds.shift_noise
    """Minimum error of a token's log-probability before centering for the copy to be worth keeping, in nats (RMS)."""
    shift_bits: float = Thresholds.shift_bits
    """Minimum bits of that error that centering must also recover: log₂ of the error before over the error after."""

    def __post_init__(self) -> None:
        check_counts(self, ("blocks",))
        check_optional_counts(self, ("block_size",))
        check_numbers(self, ("shift_noise", "shift_bits"))
        check_choices(self, {"logits": LogitStorage})


LEAST_BLOCKS, LEAST_TOKENS = 8, 1000
"""Below them neither the interval of CE nor a 95 % quantile with 50 tokens beyond it exists."""


@dataclass(frozen=True)
class DriftConfig(TextOptions):
    """Checkpoints of one run, a text, and how to measure them."""

    checkpoints: Annotated[tuple[str, ...], Option(positional=True, metavar="CHECKPOINT...")] = ()
    """Folders of checkpoints with a step in their names (`checkpoint-500`), a folder that holds them, or one Hugging Face
    id with `revisions`."""
    revisions: Annotated[tuple[str, ...], Option(metavar="A,B,...", comma_separated=True)] = ()
    """Revisions of the Hugging Face id, each with a step in its name, such as step1000,step2000."""
    blocks: BlockCount = 64
    """Number of blocks, at least 8; 0 uses the whole text."""
    block_size: int | None = None
    """Predictions per block, in tokens; all blocks together need at least 1000. Default: 256, or fewer if the model has
    fewer positions."""
    offset: int = 0
    """Blocks to skip at the start of the text."""
    valid_vocab: Annotated[int | str | None, Option(metavar="N|tokenizer")] = None
    """Rows of the head that are included in log Z, μ, w̄ and c: a number, or 'tokenizer' for the tokenizer's length.
    Default: all."""
    diag_coef: float = 1e-4
    """λ_diag, the coefficient at which R_Z is measured."""
    gradient_blocks: int = 8
    """Blocks of the diagnostic batch of R_Z; 0 skips it."""
    batch_blocks: int = 4
    """Blocks per forward pass."""
    dtype: DtypeName = "fp32"
    """Precision of the model; statistics are always fp32 or better."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoints."""
    allow_pickle: bool = False
    """Also read pickled weights."""

    def __post_init__(self) -> None:
        check_measured_coef("diag_coef", self.diag_coef)
        check_counts(self, ("batch_blocks",))
        check_optional_counts(self, ("block_size",))
        check_counts(self, ("gradient_blocks", "offset"), least=0)
        check_choices(self, {"bos": BosPolicy, "dtype": DtypeName})
        if self.blocks is not None:
            check_counts(self, ("blocks",), least=LEAST_BLOCKS)
            if self.block_size is not None and self.blocks * self.block_size < LEAST_TOKENS:
                raise InputError(
                    f"`blocks` times `block_size` is expected to be at least {LEAST_TOKENS} tokens, but is "
                    f"{self.blocks * self.block_size}: a tail needs 50 tokens beyond its quantile."
                )

    def audit(self, name: str) -> AuditConfig:
        """The audit of one checkpoint, under the name shown in results."""
        return AuditConfig(
            model=name,
            **self.text_options(),
            offset=self.offset,
            valid_vocab=self.valid_vocab,
            diag_coef=self.diag_coef,
            gradient_blocks=self.gradient_blocks,
            batch_blocks=self.batch_blocks,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
        )


StackPrecision = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["cosine", "constant"]
DEFAULT_BUDGET = "30m"
LEAST_VALID_BLOCKS = 32
"""Half of them are 16 groups; a verdict on quality needs 8."""
LEAST_VALID_TOKENS = 2000
"""Half of them leave 50 tokens beyond the 95 % quantile."""
WARMUP = 0.1
"""Share of the steps used for warm-up."""
NOT_OF_THE_RUNS = {
    *("model", "texts", "valid_texts", "text_field", "tokenizer"),  # their tokens and weights are
    *("budget", "steps", "seeds", "methods", "max_arms", "runs", "tolerance_ppl", "router_convention", "router_coef"),
}
"""Settings of a recommendation that change none of its runs."""
OF_THE_CHECKPOINT = ("lr", "schedule", "micro_batch")
"""Settings that a checkpoint may record."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.bin"
DEFAULT_LR, DEFAULT_MICRO_BATCH = 5e-5, 2
DEFAULT_SCHEDULE: Schedule = "cosine"


@dataclass(frozen=True)
class Training:
    """Learning rate, schedule and micro-batch of the runs, and where each comes from."""

    lr: float
    schedule: Schedule
    micro_batch: int
    known: tuple[str, ...]
    """Settings taken from the files of the checkpoint, as phrases."""
    assumed: tuple[str, ...]
    """Settings that come from neither the user nor these files, as phrases."""


@dataclass(frozen=True)
class RecommendConfig(TextOptions):
    """A checkpoint, its texts, a budget, and the training planned for it."""

    model: Annotated[str, Option(positional=True, metavar="MODEL")] = SMOLLM2
    """`smollm2`, a Hugging Face id, a folder in that format, or a GGUF file."""
    valid_texts: ValidTextFiles = ()
    """Text to validate on; repeat to append. Default: blocks of the training text that are not trained on."""
    budget: Annotated[str | None, Option(metavar="TIME")] = None
    """Total time, such as 90s, 30m or 1h30m. Default: 30m, or no limit if `steps` is given."""
    steps: int | None = None
    """Optimizer steps of every run, at least 100. Default: as many as the budget allows."""
    seeds: Annotated[tuple[int, ...], Option(metavar="N,N,...", comma_separated=True)] = (1, 2, 3)
    """The first seed selects an arm, the others confirm it. A single confirming seed cannot confirm anything."""
    methods: Annotated[tuple[str, ...], Option(metavar="A,B,...", comma_separated=True)] = ()
    """Arms to try before those that the audit proposes: any method of `zloss train`, such as mu-loss, or METHOD:COEFFICIENT.
    Default coefficient: 1e-4."""
    max_arms: int | None = None
    """Maximum number of arms besides CE, the most informative first. Default: as many as the audit proposes and the budget
    allows."""
    tolerance_ppl: float | None = None
    """How much PPL may rise, as an absolute number. Default: 1 % of the PPL of CE."""
    precision: StackPrecision = "fp32"
    """Precision of your training stack. bf16: the runs use bf16 autocast. bf16 and fp16: logits stored in that dtype are
    audited. fp16: the runs are in fp32."""
    lr: float | None = None
    """Peak learning rate. Default: the last one in `trainer_state.json` of the checkpoint, if its run is not finished; else
    5e-5."""
    schedule: Schedule | None = None
    """Learning rate after the warm-up: a cosine to zero, or constant, as in the middle of a long run. Default: constant if
    the learning rate comes from `trainer_state.json`, otherwise cosine."""
    warmup: int | None = None
    """Steps of linear warm-up. Default: a tenth of the steps; 0 with `optimizer_state`."""
    optimizer_state: Annotated[str | None, Option(metavar="FILE")] = None
    """Adam state saved with the checkpoint (`optimizer.pt` from transformers, or a saved `state_dict`). Default: a fresh one."""
    clip: float = 1.0
    """Gradient norm above which the gradient is clipped."""
    weight_decay: float = 0.1
    """Decoupled weight decay, per unit of learning rate."""
    micro_batch: int | None = None
    """Blocks per forward and backward pass. Default: the batch size per device in `trainer_state.json` of the checkpoint, else
    2."""
    accumulate: int = 1
    """Forward and backward passes per optimizer step."""
    block_size: int = 256
    """Predictions per block, in tokens."""
    blocks: BlockCount = 2000
    """Training blocks; 0 uses the whole text."""
    valid_blocks: int = 64
    """Validation blocks, at least 32; half of them select, the other half confirms."""
    audit_blocks: int = 32
    """Blocks of the audit, from the start of the training text."""
    router_convention: Annotated[str | None, Option(metavar="NAME")] = None
    """Convention of your router Z-loss (token_layer_mean, megatron, olmoe, ...), for a model with routers."""
    router_coef: float = 1e-3
    """λ_R of your router Z-loss, under `router_convention`."""
    runs: Annotated[tuple[str, ...], Option(metavar="DIR", repeated=True)] = ()
    """Folders of runs made by your own trainer (`zloss.record_run`) or by `zloss train`, instead of runs made here;
    repeat for several."""

    def __post_init__(self) -> None:
        check_counts(self, ("accumulate", "block_size", "valid_blocks", "audit_blocks"))
        check_numbers(self, ("clip", "router_coef", *(() if self.lr is None else ("lr",))), positive=True)
        check_numbers(self, ("weight_decay",))
        check_choices(self, {"bos": BosPolicy, "precision": StackPrecision})
        if self.schedule is not None:
            check_choices(self, {"schedule": Schedule})
        check_optional_counts(self, ("max_arms", "micro_batch"))
        if self.warmup is not None:
            check_counts(self, ("warmup",), least=0)
        refuse(
            (
                self.steps is not None and (isinstance(self.steps, bool) or self.steps < LEAST_STEPS),
                f"`steps` is expected to be at least {LEAST_STEPS}, but got {self.steps!r}: a p99 over fewer steps is little "
                "more than their maximum.",
            ),
            (
                not self.runs and len(self.seeds) < 2,
                "`seeds` is expected to list at least two seeds: the first selects an arm, the others confirm it.",
            ),
            (
                len(set(self.seeds)) != len(self.seeds) or any(seed < 0 for seed in self.seeds),
                f"`seeds` is expected to be different whole numbers ≥ 0, but got {list(self.seeds)!r}.",
            ),
            (
                self.valid_blocks < LEAST_VALID_BLOCKS or self.valid_blocks * self.block_size < LEAST_VALID_TOKENS,
                f"`valid_blocks` is expected to be at least {LEAST_VALID_BLOCKS} and to give {LEAST_VALID_TOKENS} tokens, but is "
                f"{self.valid_blocks} of {self.block_size}: each half needs 8 groups of text and 50 tokens beyond its p95.",
            ),
        )
        _ = self.budget_seconds

    @property
    def budget_seconds(self) -> float | None:
        """The budget; None if the number of steps is given instead."""
        if self.budget is None and self.steps is not None:
            return None
        return parse_duration(DEFAULT_BUDGET if self.budget is None else self.budget)

    @cached_property
    def training(self) -> Training:
        """What was set explicitly, else what `trainer_state.json` of the checkpoint holds, else the default.

        That file does not hold the schedule, so the learning rate of an unfinished run is kept constant. The last learning rate
        of a finished run is the end of its schedule, at which nothing can be learned, and is not used.
        """
        found, known, assumed = _trainer_state(Path(self.model)), list[str](), list[str]()
        lr, micro_batch, schedule = self.lr, self.micro_batch, self.schedule
        if lr is None and found.get("learning_rate"):
            lr = found["learning_rate"]
            schedule = schedule or "constant"
            known.append(f"learning rate {lr:.3g} at step {found['global_step']:,} ({TRAINER_STATE})")
        elif lr is None:
            lr = DEFAULT_LR
            assumed.append(f"learning rate {lr:g}")
        schedule = schedule or DEFAULT_SCHEDULE
        if self.schedule is None:
            pickled = (Path(self.model) / TRAINING_ARGS).is_file()
            unread = f" ({TRAINING_ARGS} was not read, because it is pickled)" if pickled else ""
            assumed.append(f"a {schedule} schedule{unread}")
        if micro_batch is None and found.get("train_batch_size"):
            micro_batch = found["train_batch_size"]
            known.append(f"{micro_batch} sequences per micro-batch ({TRAINER_STATE})")
        elif micro_batch is None:
            micro_batch = DEFAULT_MICRO_BATCH
            assumed.append(f"{micro_batch * self.accumulate * self.block_size:,} tokens per step")
        if self.optimizer_state is None:
            assumed.append("a fresh Adam state")
        else:
            known.append(f"the optimizer state ({Path(self.optimizer_state).name})")
        return Training(lr, schedule, micro_batch, tuple(known), tuple(assumed))

    @property
    def of_a_trainer(self) -> bool:
        """Whether the checkpoint is a folder of the Hugging Face Trainer."""
        return (Path(self.model) / TRAINER_STATE).is_file()

    @property
    def tokens_per_step(self) -> int:
        """Predictions of one optimizer step."""
        return self.training.micro_batch * self.accumulate * self.block_size

    def warmup_of(self, steps: int) -> int:
        """Warm-up of a run: a restored Adam state needs none."""
        if self.warmup is not None:
            return self.warmup
        return 0 if self.optimizer_state is not None else int(WARMUP * steps)

    def train_config(self, arm: Arm, seed: int, steps: int) -> TrainConfig:
        """One run; all runs of a recommendation differ in the arm and the seed alone."""
        return TrainConfig(
            model=self.model,
            method=arm.method,
            coef=arm.coef,
            seed=seed,
            **self.text_options(),
            valid_texts=self.valid_texts,
            valid_blocks=self.valid_blocks,
            steps=steps,
            warmup=self.warmup_of(steps),
            lr=self.training.lr,
            lr_floor=1.0 if self.training.schedule == "constant" else 0.0,
            weight_decay=self.weight_decay,
            clip=self.clip,
            micro_batch=self.training.micro_batch,
            accumulate=self.accumulate,
            precision="bf16" if self.precision == "bf16" else "fp32",
            gradient_blocks=2,
            optimizer_state=self.optimizer_state,
        )

    def audit_config(self) -> AuditConfig:
        """The audit, on the training text: the text that chooses the arms is not the one that evaluates them.

        Runs in fp32 do not say how logits are stored in deployment, so bf16 is assumed, as in any audit.
        """
        logits: LogitStorage = "bf16" if self.precision == "fp32" else self.precision
        return AuditConfig(model=self.model, **self.text_options(blocks=self.audit_blocks), logits=logits)

    def implementation_config(self, arm: Arm) -> ImplementationAuditConfig:
        """The audit of logits stored in the stack's precision, of the update and of the fp16 margin under the chosen arm."""
        own = (arm.method,) if arm.coef and arm.method != MU_LOSS else ("standard",)
        return ImplementationAuditConfig(
            model=self.model,
            **self.text_options(blocks=2),
            precision=self.precision,
            implementations=(NO_IMPLEMENTATION,),
            methods=("ce", *own),
            coef=arm.coef or 1e-4,
        )

    def settings(self, steps: int) -> dict[str, Any]:
        """What all runs share, as plan.json holds it."""
        keys = ("clip", "weight_decay", "accumulate", "block_size", "blocks", "valid_blocks", "precision")
        return {
            "steps": steps,
            "warmup": self.warmup_of(steps),
            **{key: getattr(self.training, key) for key in OF_THE_CHECKPOINT},
            **{key: getattr(self, key) for key in keys},
            "optimizer": "AdamW, β 0.9 and 0.95, ε 1e-8, decay on matrices and tables",
            "optimizer_state": "given" if self.optimizer_state is not None else "fresh",
        }

    @property
    def request(self) -> str:
        """What determines how many arms, seeds and steps there are."""
        named = f", methods {','.join(self.methods)}" if self.methods else ""
        most = "" if self.max_arms is None else f", at most {self.max_arms} arms"
        return f"budget {self.budget_seconds}, steps {self.steps}, seeds {','.join(map(str, self.seeds))}{named}{most}"

    def fingerprint(self, tokens: str) -> str:
        """Identity of the runs: the settings they share, and `tokens`, which identifies the tokens and the weights."""
        fields = {name: value for name, value in asdict(self).items() if name not in NOT_OF_THE_RUNS}
        fields |= {key: getattr(self.training, key) for key in OF_THE_CHECKPOINT}
        fields["optimizer_state"] = None if self.optimizer_state is None else Path(self.optimizer_state).name
        return hashlib.sha256((json.dumps(fields, sort_keys=True) + tokens).encode()).hexdigest()[:16]


def _trainer_state(folder: Path) -> dict[str, Any]:
    """`global_step`, `train_batch_size` and the last `learning_rate` of a Trainer's checkpoint, as far as it states them."""
    found: dict[str, Any] = {}
    # Of a file that says something else, what was read so far counts.
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError, StopIteration):
        state = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        batch, step = state.get("train_batch_size"), state.get("global_step")
        if type(batch) is int and batch >= 1:
            found["train_batch_size"] = batch
        rate = next(one["learning_rate"] for one in reversed(state["log_history"]) if "learning_rate" in one)
        unfinished = type(step) is int and step >= 1 and not 1 <= (state.get("max_steps") or 0) <= step
        if isinstance(rate, float) and 0 < rate < math.inf and unfinished:
            found |= {"learning_rate": rate, "global_step": step}
    return found


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `1h30m`.

    >>> parse_duration("1h30m"), parse_duration("45s")
    (5400.0, 45.0)
    """
    if not re.fullmatch(r"(\s*\d+(\.\d+)?\s*[smh]\s*)+", text):
        raise InputError(f"`budget` is expected to be a time such as 90s, 30m or 1h30m, but got {text!r}.")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)\s*([smh])", text))
    if seconds <= 0:
        raise InputError(f"`budget` is expected to be more than 0 s, but got {text!r}.")
    return seconds
