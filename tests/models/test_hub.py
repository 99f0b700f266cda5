"""A missing model is rejected immediately: a misspelled folder, a hub that does not respond."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.tiny_gguf import tiny_tensors, write_gguf
from zloss.cli.main import main
from zloss.errors import CheckpointError
from zloss.models.checkpoint import hub_is_reachable, load_checkpoint, looks_like_a_path


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that has an address but does not respond."""
    for variable in ("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("gpt2", False),
        ("EleutherAI/pythia-160m", False),
        ("./gpt2", True),
        ("/models/gpt2", True),
        ("~/gpt2", True),
        ("gpt2/", True),
        ("runs/big/checkpoint-500", True),
        ("models/gtp2", True),
    ],
)
def test_paths_and_ids(name: str, path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert looks_like_a_path(name) is path


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("models/gtp2", "model 'models/gtp2' not found: no such folder. Did you mean models/gpt2?"),
        ("lama", "Did you mean llama?"),
        ("lama.gguf", "GGUF file lama.gguf does not exist."),
    ],
)
def test_every_command_reports_a_missing_model_alike_and_immediately(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    (tmp_path / "llama").mkdir()
    errors = set()
    for command in ("audit", "train", "center", "audit-implementation"):
        began = time.perf_counter()
        assert main([command, name]) == 2
        assert time.perf_counter() - began < 10
        errors.add(capsys.readouterr().err.strip().removeprefix(f"zloss {command}: "))
    (error,) = errors
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.usefixtures("unreachable")
def test_a_hub_that_does_not_respond_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-gpt2").mkdir()
    began = time.perf_counter()
    assert not hub_is_reachable()
    with pytest.raises(CheckpointError, match=r"the Hub is unreachable.*Did you mean my-gpt2\?"):
        load_checkpoint("my-gtp2")
    assert time.perf_counter() - began < 10


def test_a_conversion_shows_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    load_checkpoint(str(write_gguf(tmp_path / "model.gguf", tiny_tensors())))
    assert capfd.readouterr().err == ""
