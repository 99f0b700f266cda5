"""Tiny checkpoints and one finished workbench, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.paper.tiny_models import save_gpt2, save_neox

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("models") / "tiny-gpt2")


@pytest.fixture(scope="session")
def neox_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_neox(tmp_path_factory.mktemp("models") / "tiny-neox")
