"""`zloss recommend` from the outside: one sentence for every mistake before anything long begins, JSON alone on stdout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from zloss.cli.main import main
from zloss.protocol import recommend
from zloss.protocol.recommend_answer import paste_lines

QUICK = ["--block-size", "64", "--valid-blocks", "32", "--audit-blocks", "4", "--blocks", "100", "--micro-batch", "1"]


def test_the_plan_is_json_alone_on_stdout(neox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", str(neox), *QUICK, "--plan", "--json", "--out", str(tmp_path / "out")]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["schema"] == "zloss.recommend-plan/1"
    assert plan["arms"][0]["method"] == "ce"
    assert all(arm["code"].startswith("zloss.") for arm in plan["arms"])
    assert main(["recommend", str(neox), *QUICK, "--plan", "--out", str(tmp_path / "out")]) == 0
    assert "zloss.record_run" in capsys.readouterr().out


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
