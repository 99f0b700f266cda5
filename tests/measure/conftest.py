"""What the tests of a pass over tokens share: a small model, its measurement, and a text of seven blocks."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import save_model
from zloss.measure.measurement import Measurement, measurement_of
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import find_head
from zloss.text import Blocks

SIZE, COUNT = 16, 7
"""Predictions per block, and blocks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(str(save_model("gpt2", tmp_path_factory.mktemp("model"))), dtype="fp64")


@pytest.fixture(scope="module")
def measurement(checkpoint: Checkpoint) -> Measurement:
    return measurement_of(find_head(checkpoint), coef=1e-4)


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    stream = torch.randint(512, (COUNT * SIZE + 1,), generator=torch.Generator().manual_seed(5))
    return Blocks(stream, SIZE, COUNT, None, 0)
