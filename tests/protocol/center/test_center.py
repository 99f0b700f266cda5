"""The centered copy is the same model with μ = 0, for every way a head can be stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_model
from zloss.errors import CoordinateError, OutputError, TiedHeadError
from zloss.protocol.center.config import CenterConfig
from zloss.protocol.center.run import center_checkpoint


def save(kind: str, folder: Path, shard: str | None = None) -> Path:
    """A tiny model with a common shift, in several files where `shard` bounds their size."""
    from transformers import AutoModelForCausalLM

    save_model(kind, folder)
    if shard is not None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=shard)
        assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def center(folder: Path, target: Path, **options: Any) -> Any:
    return center_checkpoint(CenterConfig(model=str(folder), blocks=4, block_size=32, **options), target)


@pytest.mark.parametrize(
    ("kind", "tied", "shard"),
    [
        ("neox", False, None),
        ("granite", True, None),
        ("phi", False, None),
        ("gpt2", True, None),
        ("neox", False, "40KB"),
        ("granite", True, "40KB"),
    ],
)
def test_the_copy_predicts_the_same_with_mu_zero(kind: str, tied: bool, shard: str | None, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "model", shard)
    result = center(folder, tmp_path / "out")
    assert result.verified
    assert result.ppl_relative_difference <= 1e-6
    assert result.greedy_equal
    assert result.after.mu_abs_99 < 1e-5 * result.before.mu_abs_99
    assert result.tied_before == tied
    assert not result.tied_after
    written = json.loads((tmp_path / "out" / "centering.json").read_text())
    assert written["schema"] == "zloss.centering/1"
    assert (tmp_path / "out" / "README.md").read_text().startswith("# model, row-centered")


def test_every_other_tensor_keeps_its_bits(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save("granite", tmp_path / "model", "40KB")
    center(folder, tmp_path / "out")

    def all_of(place: Path) -> dict[str, torch.Tensor]:
        return {key: value for file in sorted(place.glob("*.safetensors")) for key, value in load_file(file).items()}

    before, after = all_of(folder), all_of(tmp_path / "out")
    assert set(after) == {*before, "lm_head.weight"}
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(list(folder.glob("*.safetensors"))) + 1


def test_a_tied_head_with_learned_positions_can_stay_tied(tmp_path: Path) -> None:
    result = center(save("gpt2", tmp_path / "model"), tmp_path / "out", keep_tied=True)
    assert result.tied_after
    assert result.extra_bytes == 0
    assert result.ppl_relative_difference <= 1e-6
    assert result.greedy_equal
    assert result.after.mu_abs_99 < 1e-5 * result.before.mu_abs_99
    with pytest.raises(TiedHeadError, match="cannot keep its head tied"):
        center(save("granite", tmp_path / "rotary"), tmp_path / "none", keep_tied=True)
    assert not (tmp_path / "none").exists()


def test_an_error_after_the_download_is_not_called_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from zloss.protocol.center import source_folder as hub

    monkeypatch.setattr(hub, "hub_options", lambda: {"local_files_only": True})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CoordinateError, match="softcaps its logits"), hub.source_folder("owner/model"):
        raise CoordinateError("owner/model softcaps its logits.")


def test_a_softcapped_head_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CoordinateError, match="softcaps its logits"):
        center(save("gemma2", tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        center(save("neox", tmp_path / "model"), tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_the_copy_loads_without_our_package(tmp_path: Path) -> None:
    center(save("granite", tmp_path / "model"), tmp_path / "out")
    code = (
        "import sys; sys.modules['zloss'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        "assert model.get_output_embeddings().weight.mean(0).abs().max() < 1e-6\n"
        "assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
