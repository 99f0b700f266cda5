"""A head that starts at zero, as some recipes initialise it, gives pages without a crash."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_model
from zloss.cli.main import main


@pytest.fixture(scope="module")
def zero_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    folder = save_model("neox", tmp_path_factory.mktemp("zero"))
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    heads = [name for name in tensors if name.startswith(("embed_out", "lm_head"))]
    assert heads
    save_file(tensors | {name: torch.zeros_like(tensors[name]) for name in heads}, weights, metadata={"format": "pt"})
    return folder


def test_a_zero_head_is_audited_compared_and_followed_over_steps(zero_head: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in ("1", "2"):
        shutil.copytree(zero_head, run / f"checkpoint-{step}")
    words = ["--blocks", "2", "--block-size", "32", "--gradient-blocks", "1", "--no-figures"]
    for out in ("a", "b"):
        assert main(["audit", str(zero_head), *words, "--out", str(tmp_path / out)]) == 0
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both")]) == 0
    words = ["--blocks", "8", "--block-size", "128", "--gradient-blocks", "0", "--no-figures"]
    assert main(["drift", str(run), *words, "--out", str(tmp_path / "drift")]) == 0
