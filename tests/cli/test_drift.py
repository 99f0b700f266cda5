"""`zloss drift` from the outside: files, exit codes, one sentence for every mistake, and `zloss report` on its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.protocol.tiny_drift_run import save_run
from zloss.cli.main import main
from zloss.protocol import drift

QUICK = ["--blocks", "16", "--block-size", "64", "--gradient-blocks", "0"]


def test_drift_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = save_run(tmp_path / "run", (0, 3), steps=(5, 20)), tmp_path / "out"
    words = ["drift", str(run), "--out", str(out), *QUICK]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert "Drift that CE cannot see" in " ".join(printed.out.split())
    assert max(map(len, printed.out.splitlines()[:-2])) <= 80
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


def test_every_mistake_is_one_sentence_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run", (0, 0), steps=(5, 20))
    monkeypatch.setattr(drift, "run_audit_of", lambda *_, **__: pytest.fail("an audit began"))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "short.txt").write_text("too short")
    mistakes = {
        "missing folder": (["drift", str(tmp_path / "none")], "there is no folder"),
        "one checkpoint": (["drift", str(run / "checkpoint-5")], "CHECKPOINT... is expected to name at least two"),
        "no checkpoint": (["drift"], "CHECKPOINT... is expected to name folders"),
        "no permission": (["drift", str(run), "--out", str(tmp_path / "file" / "x")], "not a writable folder"),
        "short text": (["drift", str(run), "--text", str(tmp_path / "short.txt")], "blocks of 64"),
        "few tokens": (["drift", str(run), "--block-size", "8"], "--blocks times --block-size"),
        "revisions of a folder": (["drift", str(run), "--revisions", "step1,step2"], "--revisions belongs to"),
    }
    for name, (words, message) in mistakes.items():
        out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
        quick = QUICK if "--block-size" not in words else QUICK[:2]
        assert main([*words, *out, *quick]) == 2, name
        error = capsys.readouterr().err
        assert message in error, (name, error)
        assert error.count("\n") == 1, (name, error)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_measurement_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run", (0, 0), steps=(5, 20))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drift, "run_audit_of", interrupted)
    assert main(["drift", str(run), "--out", str(tmp_path / "out"), *QUICK]) == 130
    assert "the same command goes on" in capsys.readouterr().err
