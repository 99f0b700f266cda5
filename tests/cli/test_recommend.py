"""`zloss recommend` from the outside: one sentence for every mistake before anything long begins, JSON alone on stdout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.protocol import recommend, recommend_runs
from zloss.protocol.recommend_answer import paste_lines
from zloss.protocol.recommend_runs import RunCost

QUICK = ["--block-size", "64", "--valid-blocks", "32", "--audit-blocks", "4", "--blocks", "100", "--micro-batch", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("neox", tmp_path_factory.mktemp("model") / "neox"))


def test_every_mistake_is_one_sentence_and_exit_code_two(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_audit_of", "run_training_of"):
        monkeypatch.setattr(recommend, name, lambda *_, **__: pytest.fail("something long began"))
    slow = RunCost(step=2.0, checkpoint=0.0, valid_block=0.1, rest=1.0)
    monkeypatch.setattr(recommend, "probe_cost", lambda *_, **__: slow)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "adam.pt").write_text("no state")
    mistakes = {
        "small budget": (["--budget", "2m"], "--budget is 2 min, but CE and one arm on two seeds, 4 runs of 100 steps"),
        "no time": (["--budget", "soon"], "--budget is expected to be a time"),
        "short text": (["--text", str(tmp_path / "short.txt")], "blocks of 64"),
        "no text": (["--text", str(tmp_path / "none.txt")], "none.txt"),
        "no permission": (["--out", str(tmp_path / "file" / "x")], "not a writable folder"),
        "few steps": (["--steps", "20"], "--steps is expected to be at least 100"),
        "one seed": (["--seeds", "1"], "--seeds is expected to be at least two"),
        "no state": (["--optimizer-state", str(tmp_path / "none.pt")], "there is no file"),
        "bad state": (["--optimizer-state", str(tmp_path / "adam.pt")], "cannot be read"),
        "no runs": (["--runs", str(tmp_path / "none")], "there is no folder"),
        "no convention": (["--router-convention", "mine"], "unknown"),
    }
    for name, (words, message) in mistakes.items():
        out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
        assert main(["recommend", model, *QUICK, *words, *out]) == 2, name
        error = capsys.readouterr().err
        assert message in error, (name, error)
        assert error.count("\n") == 1, (name, error)
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend_runs, "free_bytes", lambda: 1000)
    monkeypatch.setattr(recommend, "prepare_start", lambda *_: pytest.fail("the model was loaded"))
    assert main(["recommend", model, *QUICK, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "training neox needs at least" in error
    assert error.count("\n") == 1


def test_the_plan_is_json_alone_on_stdout(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", model, *QUICK, "--plan", "--json", "--out", str(tmp_path / "out")]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["schema"] == "zloss.recommend-plan/1"
    assert plan["arms"][0]["method"] == "ce"
    assert all(arm["code"].startswith("zloss.") for arm in plan["arms"])
    assert main(["recommend", model, *QUICK, "--plan", "--out", str(tmp_path / "out")]) == 0
    assert "zloss.record_run" in capsys.readouterr().out


def test_an_interruption_says_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recommend, "run_audit_of", interrupted)
    assert main(["recommend", model, *QUICK, "--plan", "--out", str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_the_line_to_paste_lost_the_folder_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = f"{'long' * 20}/my run/checkpoint-1500"
    Path(given).mkdir(parents=True)
    paste = paste_lines("centered-head", 0.0, vocab=100, model="checkpoint-1500")
    found = replace(made_up_recommendation(), paste=paste)
    monkeypatch.setattr(recommend, "run_recommendation", lambda *_, **__: found)
    assert main(["recommend", given, "--out", "advice"]) == 0
    assert f"zloss center '{given}' --out centered" in capsys.readouterr().out
    for file in ("recommendation.json", "report.html"):
        written = Path("advice", file).read_text(encoding="utf-8")
        assert "zloss center checkpoint-1500 --out centered" in written
        assert "my run" not in written
