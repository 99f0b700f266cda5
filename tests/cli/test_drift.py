"""`zloss drift` from the outside: files, exit codes, one sentence for every mistake, and `zloss report` on its result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.protocol.tiny_drift_run import save_run
from zloss.cli.main import main

QUICK = ["--blocks", "16", "--block-size", "64", "--gradient-blocks", "0"]


def test_drift_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = save_run(tmp_path / "run", (0, 3), steps=(5, 20)), tmp_path / "out"
    words = ["drift", str(run), "--out", str(out), *QUICK]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "Drift that CE cannot see" in " ".join(printed.out.split())
    # Commands and files are not wrapped.
    assert all(len(line) <= 80 for line in printed.out.splitlines() if str(tmp_path) not in line)
    assert "checkpoint-20: measured (2 of 2)" in printed.err
    record = json.loads((out / "drift.json").read_text())
    assert (record["schema"], record["began"]) == ("zloss.drift/1", 20)
    assert str(tmp_path) not in (out / "drift.json").read_text()
    assert (out / "report.html").stat().st_size < 3_000_000
    assert main([*words, "--least-nats", "1000", "--no-figures"]) == 0
    assert "kept from before" in capsys.readouterr().err
    assert main(["report", str(out)]) == 0
    assert "checkpoints on pydoc" in capsys.readouterr().out
    assert main(["report", str(out / "checkpoints" / "checkpoint-5"), "--quiet", "--out", str(tmp_path / "one")]) == 0


@pytest.fixture(scope="module")
def zero_head(neox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that starts at zero, as some recipes initialize it."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(neox, tmp_path_factory.mktemp("zero") / "neox"))
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
