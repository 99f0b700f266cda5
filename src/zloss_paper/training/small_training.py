"""The training tables at the cpu and smoke profiles: one setting of ours, varied where a table varies the paper's.

Tables that differ only in the paper's model, corpus or length have the same small setting, and so share their runs. The
learning rate is ours; a stress table multiplies it by the ratio of its own learning rate to the paper's usual 5e-5.
"""

from __future__ import annotations

from dataclasses import dataclass

from zloss.results.train_config import TrainConfig
from zloss.train.stress import EFFECTIVELY_UNCLIPPED
from zloss_paper.training.base_model import CPU, SMOKE, Scale, split

LEARNING_RATE = 2.5e-4
GPT2_SHIFT, PYTHIA_SHIFT = 250.0, 700.0
"""p99 |μ| that the shifted head starts with: that of GPT-2, and of Pythia-160M."""
SEEDS = (1, 2)
SCALES: dict[str, Scale] = {"cpu": CPU, "smoke": SMOKE}


@dataclass(frozen=True)
class SmallSetting:
    """In what the small runs of a table differ from those of the others."""

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


def small_config(profile: str, setting: SmallSetting, texts: tuple[str, ...]) -> TrainConfig:
    """The run that all methods of a table share, at a small profile."""
    scale = SCALES[profile]
    parts = split(scale, texts)
    smoke = profile == "smoke"
    return TrainConfig(
        model="small-gpt2",
        untie=bool(setting.head_shift),
        head_shift=setting.head_shift,
        texts=texts,
        blocks=min(scale.subset, parts.continued) if setting.fixed_subset else parts.continued,
        offset=parts.pretraining,
        valid_blocks=parts.valid,
        valid_offset=parts.valid_offset,
        block_size=scale.block_size,
        steps=4 if smoke else 200,
        warmup=1 if smoke else 20,
        lr=LEARNING_RATE * setting.lr_factor,
        clip=setting.clip,
        micro_batch=2,
        adam_every=2 if smoke else 50,
        gradient_blocks=2 if smoke else 8,
    )
