"""All runs of a grid are checked before the first one trains: what one of them refuses would else end the grid midway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zloss.distributed import Job
from zloss.errors import InputError, ZlossError
from zloss.results.train_config import TrainConfig
from zloss.train.data.micro_batches import check_divisible
from zloss.train.folder.run_folder import refuse_other_settings
from zloss.train.start.run_start import Start
from zloss.train.step.run_loss import run_loss

CHECK_TOKENS = 8
"""Tokens of the forward pass that every method is tried on."""


def check_runs(configs: Sequence[TrainConfig], start: Start, folder: Path, job: Job) -> None:
    """An error where a run cannot be divided over the processes of `job`, where a folder holds a run with other settings, or
    where a method cannot be computed for this model."""
    for config in configs:
        check_divisible(config, job)
    for config in configs:
        refuse_other_settings(folder / config.name, config, start)
    tried = {replace(config, seed=0): config for config in configs}
    for config in tried.values():
        _try_loss(config, start)


@torch.no_grad()
def _try_loss(config: TrainConfig, start: Start) -> None:
    """The loss of the run on a few tokens of its text."""
    blocks = start.data.train
    tokens = min(CHECK_TOKENS, blocks.size)
    inputs = blocks.inputs(0, 1)[:, : tokens + (blocks.bos_id is not None)]
    try:
        run_loss(config, start.checkpoint, start.data)(inputs, blocks.targets(0, 1)[:, :tokens], tokens)
    except ZlossError as error:
        raise InputError(f"{config.method} cannot be trained on {start.checkpoint.name}: {error}") from error
