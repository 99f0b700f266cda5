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
from tests.tiny_models import save_model, save_tokenizer
from zloss.cli.main import main

LOSS = "def loss(logits, target):\n    import torch\n    return torch.nn.functional.cross_entropy(logits, target)\n"
COMMANDS = ("audit", "audit-implementation", "audit-loss", "center", "drift", "recommend", "train")
WITH_ALLOW_PICKLE = ("audit", "audit-implementation", "drift")
WITH_TOKENIZER = ("audit", "audit-implementation", "drift", "recommend", "train")
WITH_VALID_VOCAB = ("audit", "audit-loss", "center", "drift")


def words(command: str, model: Path, place: Path) -> list[str]:
    """The command on the model `model/checkpoint-1`; for drift, on both checkpoints."""
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
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints as saved by a loop that only calls `model.save_pretrained`."""
    folder = tmp_path_factory.mktemp("silent")
    for file in save_model("neox", folder / "checkpoint-1").glob("tokenizer*"):
        file.unlink()
    return two_checkpoints(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_without_a_tokenizer_names_the_flag_where_there_is_one(
    command: str, without_tokenizer: Path, tmp_path: Path, refused: Refused
) -> None:
    said = "checkpoint-1 has no tokenizer: put its tokenizer files in the same folder"
    error = refused(words(command, without_tokenizer, tmp_path), said)
    assert (", or pass --tokenizer, a folder or Hugging Face id that has them." in error) == (command in WITH_TOKENIZER)
    assert "`tokenizer`" not in error


def test_an_audit_with_the_tokenizer_of_another_folder_is_that_of_the_whole_checkpoint(
    without_tokenizer: Path, neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--blocks", "4", "--block-size", "32", "--gradient-blocks", "1", "--no-figures"]
    save_tokenizer(tmp_path / "tokenizer")
    given = ["--tokenizer", str(tmp_path / "tokenizer")]
    reports = []
    for name, argv in (("a", [str(neox)]), ("b", [str(without_tokenizer / "checkpoint-1"), *given])):
        assert main(["audit", *argv, *quick, "--out", str(tmp_path / name)]) == 0
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert str(tmp_path) not in json.dumps(report)
        for key in ("provenance", "timings", "model"):
            report.pop(key)
        reports.append(report)
    assert reports[0] == reports[1]
    capsys.readouterr()


def test_a_run_with_the_tokenizer_of_another_folder_trains_on_the_same_tokens(
    without_tokenizer: Path, neox: Path, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    quick = ["--methods", "ce", "--steps", "2", "--block-size", "24", "--valid-blocks", "4", "--trackers", "none"]
    given = ["--tokenizer", str(tmp_path / "tokenizer")]
    found = []
    for name, argv in (("a", [str(neox)]), ("b", [str(without_tokenizer / "checkpoint-1"), *given])):
        assert main(["train", *argv, *quick, "--out", str(tmp_path / name)]) == 0
        config = json.loads((tmp_path / name / "ce-0-s1" / "config.json").read_text())
        found.append((config.pop("tokenizer", None), config["data"], config["initial_weights"]))
    assert found[0][1:] == found[1][1:]
    assert [name for name, *_ in found] == [None, "tokenizer"]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a LoRA run as peft and the Trainer write them: no config.json, only the weights of the adapter."""
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
    # The hub's library reads its folder when it is imported: a process of their own for both commands.
    calls = [[command, "owner/lora", "--out", str(tmp_path / "out")] for command in ("audit", "center")]
    code = f"from zloss.cli.main import main; print([main(words) for words in {calls}])"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout == "[2, 2]\n"
    said = "owner/lora is a PEFT adapter (LORA), which is only a change to the model owner/base"
    assert [said in line for line in ended.stderr.splitlines()] == [True, True]


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
