"""Model folders that no command can read as they are: each command says what the folder is and what to do with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Refused
from tests.tiny_models import save_model

LOSS = "def loss(logits, target):\n    import torch\n    return torch.nn.functional.cross_entropy(logits, target)\n"
COMMANDS = ("audit", "audit-implementation", "audit-loss", "center", "drift", "recommend", "train")
WITH_ALLOW_PICKLE = ("audit", "audit-implementation", "drift")
WITH_VALID_VOCAB = ("audit", "audit-loss", "center", "drift")


def words(command: str, model: Path, place: Path) -> list[str]:
    """The command on the model `model/checkpoint-1`; of drift on both checkpoints."""
    (place / "loss.py").write_text(LOSS)
    if command == "audit-loss":
        return ["audit-loss", f"{place / 'loss.py'}:loss", "--model", str(model / "checkpoint-1"), "--blocks", "1"]
    given = model if command == "drift" else model / "checkpoint-1"
    return [command, str(given), "--out", str(place / "out")]


def two_checkpoints(model: Path) -> Path:
    """The model `checkpoint-1` next to a copy of it."""
    shutil.copytree(model / "checkpoint-1", model / "checkpoint-2")
    return model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a LoRA run as peft and the Trainer write them: no config.json, the weights of the adapter alone."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("lora")
    save_model("neox", folder / "checkpoint-1")
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / "checkpoint-1" / name).unlink()
    config = {"base_model_name_or_path": "owner/base", "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4}
    (folder / "checkpoint-1" / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora": torch.zeros(1)}, folder / "checkpoint-1" / "adapter_model.safetensors")
    return two_checkpoints(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_peft_adapter_was_called_not_a_hugging_face_model(
    command: str, adapter: Path, tmp_path: Path, refused: Refused
) -> None:
    said = "checkpoint-1 is a PEFT adapter (LORA), which is only a change to the model owner/base"
    refused(words(command, adapter, tmp_path), said, "merge_and_unload", "or pass owner/base itself")
    assert not (tmp_path / "out").exists()


def test_an_adapter_with_a_config_next_to_it_and_one_next_to_whole_weights(tmp_path: Path, refused: Refused) -> None:
    """transformers loads the adapter or the weights of such a folder, depending on whether peft is installed."""
    folder = save_model("neox", tmp_path / "checkpoint-1")
    (folder / "adapter_config.json").write_text("damaged")
    audit = words("audit", tmp_path, tmp_path)
    refused(audit, "holds both the weights of a model and a PEFT adapter")
    (folder / "model.safetensors").unlink()
    refused(audit, "is a PEFT adapter, which is only a change to another model: merge")


def test_an_adapter_on_the_hub_was_called_no_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--lora" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base", "peft_type": "LORA"}')
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    for command in ("audit", "center"):
        call = [sys.executable, "-m", "zloss", command, "owner/lora", "--out", str(tmp_path / "out")]
        ended = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert "owner/lora is a PEFT adapter (LORA), which is only a change to the model owner/base" in ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_pickled_weights_were_refused_with_an_option_that_the_command_does_not_have(
    command: str, tmp_path: Path, refused: Refused
) -> None:
    from safetensors.torch import load_file

    folder = save_model("neox", tmp_path / "run" / "checkpoint-1")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    allowed = command in WITH_ALLOW_PICKLE
    instead = "--allow-pickle" if allowed else "save it to a new folder with save_pretrained"
    argv = words(command, two_checkpoints(folder.parent), tmp_path)
    error = refused(argv, "has no safetensors weights", instead)
    assert allowed or "allow" not in error


@pytest.mark.parametrize("command", WITH_VALID_VOCAB)
def test_more_valid_rows_than_the_head_has_are_one_sentence(
    command: str, neox: Path, tmp_path: Path, refused: Refused
) -> None:
    shutil.copytree(neox, tmp_path / "run" / "checkpoint-1")
    argv = words(command, two_checkpoints(tmp_path / "run"), tmp_path)
    refused([*argv, "--valid-vocab", "513", "--block-size", "32", "--quiet"], "--valid-vocab is", "513", "512")
