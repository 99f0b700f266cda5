"""The model that the training tables start from at the cpu and smoke profiles: a small GPT-2, pretrained once.

It has four layers of width 192 and a byte-level BPE of 4096 entries: 2.6 M parameters, tied. It is pretrained on the first
part of the text. Continued runs train on the blocks behind that part, and all runs are validated on the last blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from zloss.errors import CorpusError
from zloss.results.train_config import TrainConfig
from zloss.text import pydoc_topics

BYTES_PER_TOKEN = 5
"""More than the mean of a BPE of this size, so a text has at least as many blocks as are counted with it."""
LEAST_BLOCKS = 64
"""A shorter text gives too few blocks to train, continue and validate on."""


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


@dataclass(frozen=True)
class Split:
    """Where the parts of a text lie, in blocks."""

    pretraining: int
    continued: int
    valid: int

    @property
    def valid_offset(self) -> int:
        return self.pretraining + self.continued


def split(scale: Scale, texts: tuple[str, ...]) -> Split:
    """The parts of a text: the scale's counts, or three quarters, a fifth and the rest of a short one."""
    available = _bytes(texts) // (BYTES_PER_TOKEN * scale.block_size)
    if available < LEAST_BLOCKS:
        raise CorpusError(
            f"the text has about {available} blocks of {scale.block_size}, but at least {LEAST_BLOCKS} are needed to "
            "pretrain, continue and validate: give a longer text."
        )
    valid = min(scale.valid_blocks, available // 16)
    continued = min(scale.blocks, available // 5)
    return Split(min(scale.pretraining_blocks, available - continued - valid), continued, valid)


def base_config(scale: Scale, texts: tuple[str, ...]) -> TrainConfig:
    """The pretraining run."""
    parts = split(scale, texts)
    return TrainConfig(
        model="small-gpt2",
        from_config=str(resources.files("zloss_paper").joinpath("data", scale.shape)),
        train_tokenizer=scale.vocab,
        texts=texts,
        blocks=parts.pretraining,
        valid_blocks=parts.valid,
        valid_offset=parts.valid_offset,
        block_size=scale.block_size,
        steps=scale.pretraining_steps,
        warmup=scale.pretraining_warmup,
        lr=2e-3,
        micro_batch=4,
    )


def _bytes(texts: tuple[str, ...]) -> int:
    try:
        return sum(Path(text).stat().st_size for text in texts) or len("\n\n".join(pydoc_topics()).encode())
    except OSError as error:
        raise CorpusError(f"cannot read the text {error.filename}: {error.strerror}.") from error
