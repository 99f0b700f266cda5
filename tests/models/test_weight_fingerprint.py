"""The fingerprint of a model: any change of a weight or of the config shows in it, the place it was loaded from does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_model
from zloss.models.checkpoint import load_checkpoint, model_fingerprint, sampled_fingerprint, weight_fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("cohere", tmp_path_factory.mktemp("model"))


def test_one_bit_of_one_weight_shows(folder: Path) -> None:
    """Beyond the first 64 entries of a tensor, a change was not seen."""
    model = load_checkpoint(str(folder)).model
    first, sampled = weight_fingerprint(model), sampled_fingerprint(model)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight[200, 3] = torch.nextafter(weight[200, 3], torch.tensor(torch.inf))
        assert weight_fingerprint(model) != first
        assert sampled_fingerprint(model) == sampled
        weight[200, 3] = torch.nextafter(weight[200, 3], torch.tensor(-torch.inf))
        assert weight_fingerprint(model) == first
        weight[[200, 201]] = weight[[201, 200]]
        assert weight_fingerprint(model) != first


def test_the_config_shows_and_the_place_does_not(folder: Path, tmp_path: Path) -> None:
    first = model_fingerprint(load_checkpoint(str(folder)))
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert model_fingerprint(load_checkpoint(str(moved))) == first
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    other = load_checkpoint(str(moved))
    assert model_fingerprint(other) != first
    assert weight_fingerprint(other.model) == weight_fingerprint(load_checkpoint(str(folder)).model)


def test_every_dtype_has_a_fingerprint(folder: Path) -> None:
    found = {weight_fingerprint(load_checkpoint(str(folder), dtype=dtype).model) for dtype in ("fp32", "fp64", "bf16")}
    assert len(found) == 3
    tied, untied = load_checkpoint(str(folder)).model, load_checkpoint(str(folder)).model
    head = untied.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    assert weight_fingerprint(tied) != weight_fingerprint(untied)
