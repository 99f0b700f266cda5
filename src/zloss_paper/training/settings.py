"""The settings of a training table: its arms, the run at the paper's scale, the small runs, and how they deviate.

At the cpu and smoke profiles all tables start from a small GPT-2, pretrained once on the first part of the text: four layers of
width 192 and a byte-level BPE of 4096 entries, 2.6 M parameters, tied. Continued runs train on the blocks behind that part, and
all runs are validated on the last blocks. Tables that differ only in the paper's model, corpus or length have the same small
setting, and so share their runs. The learning rate is ours; a stress table multiplies it by the ratio of its own learning rate
to the paper's usual 5e-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from zloss.errors import CorpusError
from zloss.results.run_config import TrainConfig
from zloss.text import pydoc_topics
from zloss.train.options import EFFECTIVELY_UNCLIPPED
from zloss_paper.engine.claims import Claim
from zloss_paper.engine.inputs import (
    CE,
    CENTERED,
    CENTERED_HEAD,
    CORPUS_NAMES,
    METHODS,
    MODEL_IDS,
    RAW_METHODS,
    STANDARD,
    TextSource,
    papers_model,
    printed_name,
    training_sources,
)
from zloss_paper.engine.recipe import Overrides, Profile
from zloss_paper.engine.table import Key

BYTES_PER_TOKEN = 5
"""More than the average of a BPE of this size, so a text always has at least the number of blocks estimated with it."""
LEAST_BLOCKS = 64
"""A shorter text gives too few blocks to pretrain, continue and validate on."""
LEARNING_RATE = 2.5e-4
SEEDS = (1, 2)
GPT2_SHIFT, PYTHIA_SHIFT = 250.0, 700.0
"""p99 |μ| that the shifted head starts with: that of GPT-2, and of Pythia-160M."""


@dataclass(frozen=True)
class Arm:
    """A method at a coefficient: one line of a training table."""

    method: str
    """The method, by its name in the paper."""
    coef: float = 0.0
    key: tuple[tuple[str, Key], ...] = ()
    """Key of its line; empty: the method alone."""

    def of(self, shared: TrainConfig, seed: int) -> TrainConfig:
        """The run of this arm at a seed; `shared` holds the rest of its setting."""
        return replace(shared, method=METHODS[self.method], coef=self.coef, seed=seed)


BASELINE = Arm(CE)
LOW_ARMS = (BASELINE, Arm(CENTERED_HEAD), Arm(STANDARD, 1e-4), Arm(CENTERED, 1e-4))
"""The four methods of the low-coefficient tables."""


def stress_arms(coef: float) -> tuple[Arm, ...]:
    """All six methods in the order of the stress tables."""
    raw = (Arm(method, coef) for method in RAW_METHODS)
    return (BASELINE, Arm(CENTERED_HEAD), *raw, Arm(CENTERED, coef))


@dataclass(frozen=True)
class SmallSetting:
    """How the small runs of a table differ from those of the others."""

    head_shift: float = GPT2_SHIFT
    """0: the head stays tied and as it was trained."""
    lr_factor: float = 1.0
    clip: float = 1.0
    fixed_subset: bool = False
    """Train on a few blocks over and over."""


LOW = SmallSetting()
TIED = SmallSetting(head_shift=0.0)
FIXED_SUBSET = SmallSetting(fixed_subset=True)
LARGER_SHIFT = SmallSetting(head_shift=PYTHIA_SHIFT)
UNCLIPPED = SmallSetting(lr_factor=4, clip=EFFECTIVELY_UNCLIPPED)
UPDATE_OUTLIER = SmallSetting(lr_factor=16, clip=EFFECTIVELY_UNCLIPPED)


@dataclass(frozen=True)
class TrainingTable:
    """A table of matched runs as data: the paper's setting, which small setting replaces it, and what the paper says."""

    label: str
    model: str
    """The paper's name of its model."""
    corpus: str
    """The paper's name of its corpus."""
    columns: tuple[str, ...]
    run: Mapping[str, Any]
    """The settings of this table that all methods share at the paper's scale."""
    arms: tuple[Arm, ...] = LOW_ARMS
    seeds: tuple[int, ...] = (1, 2, 3)
    small: SmallSetting = LOW
    claims: tuple[Claim, ...] = ()
    title: str = ""
    """Empty: the title of the paper's table."""
    printed: bool = True
    """Whether the paper prints numbers of these runs, not only describes them."""
    figure: bool = False
    """Whether the steps of its runs are drawn."""

    @property
    def paper_run(self) -> TrainConfig:
        """The run at the paper's scale: bf16 autocast, materialized logits; `TrainConfig` has the paper's optimizer."""
        model, corpus = MODEL_IDS[self.model], CORPUS_NAMES[self.corpus]
        base = TrainConfig(model=model, corpus=corpus, block_size=256, precision="bf16", head="paper")
        return replace(base, **{"micro_batch": 8, "accumulate": 2, **self.run})

    def configure(self, profile: Profile, overrides: Overrides) -> TrainingTableConfig:
        """The complete setting at a profile."""
        texts = tuple(overrides.texts)
        base = None
        if profile == "paper":
            shared, seeds = self.paper_run, self.seeds
            if texts:
                shared = replace(shared, texts=texts, corpus=None)
        else:
            shared, seeds = small_config(profile, self.small, texts), SEEDS
            base = base_config(SCALES[profile], texts)
        start, name = _start_model(overrides.models, self.model)
        if start is not None:
            shared, base = replace(shared, model=start), None
        if overrides.blocks is not None:
            shared = replace(shared, blocks=overrides.blocks or None)
        if overrides.block_size is not None:
            shared = replace(shared, block_size=overrides.block_size)
        sources = training_sources(texts, shared.corpus, overrides.text_source)
        config = TrainingTableConfig(self.label, profile, shared, base, self.arms, seeds, sources, ())
        return replace(config, deviations=_deviations(config, self, name))


@dataclass(frozen=True)
class TrainingTableConfig:
    """The complete setting of one table, as its result file holds it."""

    label: str
    profile: Profile
    train: TrainConfig
    """What all runs share; method, coefficient and seed are those of CE."""
    base: TrainConfig | None
    """The pretraining that gives the start; None: `train.model` is a checkpoint."""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    texts: tuple[TextSource, ...]
    deviations: tuple[str, ...]


def _start_model(given: Sequence[str], model: str) -> tuple[str | None, str | None]:
    """(where to load the start of a table whose paper model is `model`, its printed name where it is another model).

    The models are those the user names; (None, None) where none fits.
    """
    read = {word: papers_model(word) for word in given}
    for known, folder in read.values():
        if known == model:
            return folder or MODEL_IDS[model], None
    other = next((word for word, (known, _) in read.items() if known is None), None)
    return (None, None) if other is None else (other, printed_name(other))


def _deviations(config: TrainingTableConfig, table: TrainingTable, other_model: str | None) -> tuple[str, ...]:
    """How the runs of `config` differ from the table's setting in the paper, one sentence each."""
    ours, paper = config.train, table.paper_run
    found = []
    if config.base is not None:
        found.append(f"the model is a small GPT-2 that the recipe pretrains, not {table.model}")
    elif other_model is not None:
        found.append(f"the model is {other_model}, not {table.model}")
    if ours.head_shift:
        found.append(
            f"its head is untied and shifted until p99 |μ| is about {ours.head_shift:g}: a probe of ours that leaves CE as it is"
        )
    if {source.corpus for source in config.texts} != {table.corpus}:
        found.append(f"the text is {' + '.join(source.title for source in config.texts)}, not {table.corpus}")
    if (ours.steps, ours.tokens_per_step) != (paper.steps, paper.tokens_per_step):
        found.append(
            f"{ours.steps} steps of {ours.tokens_per_step} tokens, not {paper.steps} of {paper.tokens_per_step:,}"
        )
    if ours.lr != paper.lr:
        found.append(f"the learning rate is {ours.lr:g} (ours), not {paper.lr:g}")
    if (ours.precision, ours.head) != (paper.precision, paper.head):
        found.append(f"{ours.precision} with the {ours.head} head, not {paper.precision} with materialized logits")
    if len(config.seeds) != len(table.seeds):
        found.append(f"{len(config.seeds)} seeds, not {len(table.seeds)}")
    if not found and (ours.blocks, ours.block_size) != (paper.blocks, paper.block_size):
        found.append(
            f"{ours.blocks or 'all'} blocks of {ours.block_size}, not {paper.blocks or 'all'} of {paper.block_size}"
        )
    return tuple(found)


@dataclass(frozen=True)
class Scale:
    """Size of the small model and of its runs."""

    shape: str
    vocab: int
    block_size: int
    pretraining_blocks: int
    pretraining_steps: int
    pretraining_warmup: int
    blocks: int
    """Blocks of a continued run: with its steps they give the paper's token reuse of 0.96, where the text is long enough."""
    subset: int
    """Blocks of a run on a small fixed subset."""
    valid_blocks: int


CPU = Scale("base_model.json", 4096, 128, 9600, 2400, 100, 416, 43, 64)
SMOKE = Scale("base_model_smoke.json", 300, 32, 64, 12, 2, 32, 8, 4)
SCALES: dict[str, Scale] = {"cpu": CPU, "smoke": SMOKE}


def split(scale: Scale, texts: tuple[str, ...]) -> tuple[int, int, int]:
    """Blocks of a text to pretrain on, to continue on and to validate on, one part after the other.

    The scale's counts, or three quarters, a fifth and the rest of a short text.
    """
    try:
        size = sum(Path(text).stat().st_size for text in texts) or len("\n\n".join(pydoc_topics()).encode())
    except OSError as error:
        raise CorpusError(f"cannot read the text {error.filename}: {error.strerror}.") from error
    available = size // (BYTES_PER_TOKEN * scale.block_size)
    if available < LEAST_BLOCKS:
        raise CorpusError(
            f"the text has about {available} blocks of {scale.block_size}, but at least {LEAST_BLOCKS} are needed to "
            "pretrain, continue and validate: give a longer text."
        )
    valid = min(scale.valid_blocks, available // 16)
    continued = min(scale.blocks, available // 5)
    return min(scale.pretraining_blocks, available - continued - valid), continued, valid


def base_config(scale: Scale, texts: tuple[str, ...]) -> TrainConfig:
    """The pretraining run."""
    pretraining, continued, valid = split(scale, texts)
    return TrainConfig(
        model="small-gpt2",
        from_config=str(resources.files("zloss_paper").joinpath("data", scale.shape)),
        train_tokenizer=scale.vocab,
        texts=texts,
        blocks=pretraining,
        valid_blocks=valid,
        valid_offset=pretraining + continued,
        block_size=scale.block_size,
        steps=scale.pretraining_steps,
        warmup=scale.pretraining_warmup,
        lr=2e-3,
        micro_batch=4,
    )


def small_config(profile: str, setting: SmallSetting, texts: tuple[str, ...]) -> TrainConfig:
    """The run that all methods of a table share, at a small profile."""
    scale = SCALES[profile]
    pretraining, continued, valid = split(scale, texts)
    smoke = profile == "smoke"
    return TrainConfig(
        model="small-gpt2",
        untie=bool(setting.head_shift),
        head_shift=setting.head_shift,
        texts=texts,
        blocks=min(scale.subset, continued) if setting.fixed_subset else continued,
        offset=pretraining,
        valid_blocks=valid,
        valid_offset=pretraining + continued,
        block_size=scale.block_size,
        steps=4 if smoke else 200,
        warmup=1 if smoke else 20,
        lr=LEARNING_RATE * setting.lr_factor,
        clip=setting.clip,
        micro_batch=2,
        adam_every=2 if smoke else 50,
        gradient_blocks=2 if smoke else 8,
    )
