"""The complete setting of a training table at one profile."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.results.train_config import TrainConfig
from zloss_paper.engine.profile import Profile
from zloss_paper.engine.texts import TextSource
from zloss_paper.training.arms import Arm


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
