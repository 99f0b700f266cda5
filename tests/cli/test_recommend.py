"""`zloss recommend` from the outside: one sentence for every mistake before anything long begins, JSON alone on stdout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from tests.report.printing import printed
from zloss.cli.main import main
from zloss.decide.recommend import with_verdict
from zloss.protocol import recommend
from zloss.protocol.config import RecommendConfig
from zloss.protocol.recommend_answer import next_command, paste_lines
from zloss.report.recommendation import recommendation_summary
from zloss.results.decision import Consequence
from zloss.results.recommendation import Recommendation

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


def next_of(found: Recommendation, words: list[str], **changes: Any) -> tuple[str, str]:
    config = replace(RecommendConfig(model="my model"), **changes)
    return next_command(found, config, ["recommend", "my model", *words], "advice/")


def test_an_undecided_answer_is_followed_by_fresh_seeds_of_its_arm_in_a_new_folder() -> None:
    """ "3 seeds would settle it" used to invite one more seed in the same folder, after a look at the answer."""
    found = with_verdict(replace(made_up_recommendation(), level="direction only"))
    words = ["--text", "a b.txt", "--seeds", "1,2,3", "--budget=45m", "--max_arms", "2", "--force", "--out", "advice/"]
    command, why = next_of(found, words)
    assert command == (
        "zloss recommend 'my model' --text 'a b.txt' --methods centered:0.001 --max-arms 1 --steps 100 --seeds 4,5,6,7 "
        "--out advice-2"
    )
    assert "does not depend on this answer" in why
    command, why = next_of(found, ["--runs", "mine"], runs=("mine",))
    assert (command, why) == (
        "zloss recommend 'my model' --runs mine",
        "record runs of more seeds with your trainer, then repeat this command",
    )


def test_every_other_answer_has_a_next_command_too() -> None:
    found = made_up_recommendation()
    assert next_of(found, [])[1].startswith("train with the lines above")
    for objective, said in (
        ("ce", "zloss audit-loss MODULE:FUNCTION"),
        ("centered-head", "zloss center 'my model' --out centered"),
    ):
        assert next_of(with_verdict(replace(found, objective=objective, coef=0.0)), [])[0] == said
    known = Consequence("noise", 0.001, 0.01, "nat", False, "It is small.")
    idle = with_verdict(replace(found, stages=tuple(replace(stage, consequence=known) for stage in found.stages)))
    assert next_of(idle, [])[1].startswith("keep training as you do. If you already use a Z-loss")
    # Its summary does not say what to paste, and fits.
    shown = printed(recommendation_summary(idle))
    assert "Lines to paste" not in shown
    assert len(shown.strip().splitlines()) <= 25


def test_the_lines_of_the_trainer_come_first_for_its_checkpoints() -> None:
    for trainer, first in ((True, "transformers"), (False, "plain loop")):
        assert paste_lines("standard", 1e-4, vocab=100, model="m", trainer=trainer)[0].where == first
