"""`zloss audit` from the outside: files, exit codes, one sentence for every mistake, Ctrl-C and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.child import Child, largest_file, run
from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.text import pydoc_topics

QUICK = ["--blocks", "6", "--block-size", "32", "--gradient-blocks", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gpt2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(pydoc_topics()))
    return path


def test_an_audit_writes_its_report_and_prints_its_table(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    assert main(["audit", str(model), "--text", str(text), "--out", str(out), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "P_Z^99.9" in printed
    assert "Decision map" in printed
    last = printed.splitlines()[-1].strip()
    assert last.startswith("zloss ")
    assert str(model) in last
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "zloss.audit/1"
    assert report["corpus"]["predictions"] == 6 * 32
    assert len(report["decisions"]) == 8
    assert str(tmp_path) not in json.dumps(report["provenance"])
    assert (out / "report.html").stat().st_size < 3_000_000
    assert list((out / "figures").glob("*.svg"))
    assert main(["report", str(out), "--quiet"]) == 0


def test_quiet_is_quiet(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(model), "--quiet", "--no-figures", "--out", str(tmp_path), *QUICK]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def mistakes(model: Path, tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Käse ".encode("latin1") * 5000)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    broken = tmp_path / "broken"
    save_model("gpt2", broken)
    (broken / "model.safetensors").write_bytes(b"\x00" * 64)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\x00" * 40)
    file = tmp_path / "file"
    file.write_text("in the way")
    return {
        "no such model": (["nobody/nothing"], "no model"),
        "no such text": ([str(model), "--text", str(tmp_path / "none.txt")], "cannot read the text"),
        "wrong encoding": ([str(model), "--text", str(latin)], "not UTF-8"),
        "too short a text": ([str(model), "--text", str(short)], "blocks of 32"),
        "corrupt safetensors": ([str(broken)], "cannot be loaded"),
        "corrupt gguf": ([str(tmp_path / "broken.gguf")], "GGUF"),
        "output is a file": ([str(model), "--out", str(file / "x")], "not a writable folder"),
        "negative coefficient": ([str(model), "--diag-coef", "-1"], "--diag-coef is expected"),
        "bad vocabulary": ([str(model), "--valid-vocab", "99999"], "--valid-vocab"),
        "text and corpus": (
            [str(model), "--text", str(short), "--corpus", "pydoc"],
            "--text and --corpus exclude each other",
        ),
        "resume of rubbish": ([str(model), "--out", str(tmp_path / "rubbish"), "--resume"], "cannot be read"),
    }


def test_every_mistake_is_one_sentence_and_exit_code_two(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rubbish" / "audit-parts").mkdir(parents=True)
    (tmp_path / "rubbish" / "audit-parts" / "part-000000000-000000004.npz").write_bytes(b"rubbish")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "report.json").write_text("an earlier report")
    made = mistakes(model, tmp_path)
    capsys.readouterr()  # bars of transformers
    for name, (words, message) in made.items():
        arguments = words if "--out" in words else [*words, "--out", str(kept)]
        assert main(["audit", *arguments, *QUICK]) == 2, name
        error = capsys.readouterr().err
        assert message in error, name
        assert "Traceback" not in error
        assert error.count("\n") == 1, f"{name}: {error}"
    assert (kept / "report.json").read_text() == "an earlier report"
    assert sorted(path.name for path in kept.iterdir()) == ["report.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a filesystem that is full")
def test_a_full_disk_is_one_sentence(model: Path, tmp_path: Path) -> None:
    """A tiny file system in a user namespace would need privileges; a limit on file size fails writes the same way."""
    words = ["audit", str(model), "--quiet", "--out", str(tmp_path / "full"), *QUICK]
    done = run(words, largest_file(2000)).check_contract()
    assert done.code == 2, done.error
    assert "cannot write" in done.error
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


def test_ctrl_c_leaves_a_partial_report_and_resume_finishes_it(model: Path, text: Path, tmp_path: Path) -> None:
    words = [str(model), "--text", str(text), "--out", str(tmp_path), "--blocks", "200", "--block-size", "64"]
    words += ["--batch-blocks", "1", "--quiet", "--gradient-blocks", "1", "--no-figures"]
    process = Child(["audit", *words], lambda: os.environ.update(ZLOSS_SAVE_EVERY="0"))
    parts = tmp_path / "audit-parts"
    deadline = time.monotonic() + 120
    while not list(parts.glob("part-*.npz")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill(signal.SIGINT)
    ended = process.wait()
    assert ended.code == 130, ended.error
    assert "--resume" in ended.error
    partial = json.loads((tmp_path / "report.json").read_text())
    assert partial["status"] == "partial"
    assert 0 < partial["finished_blocks"] < 200
    assert partial["corpus"]["predictions"] == 64 * partial["finished_blocks"]
    assert main(["audit", *words, "--resume"]) == 0
    resumed = json.loads((tmp_path / "report.json").read_text())
    assert resumed["status"] == "complete"
    assert main(["audit", *words, "--out", str(tmp_path / "whole")]) == 0
    whole = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert resumed["heads"] == whole["heads"]
    assert resumed["ppl"] == whole["ppl"]
