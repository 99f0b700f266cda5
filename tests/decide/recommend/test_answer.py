"""Selection and confirmation to an answer: every row of the table in `decide/recommend/answer.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zloss.decide.recommend import answer
from zloss.decide.recommend.answer import decide_answer
from zloss.decide.recommend.judged_arm import JudgedArm, judge_arms, ranked
from zloss.results.comparison import Comparison
from zloss.results.quality import QualityVerdict
from zloss.results.verdict import VerdictName


def arm(
    method: str = "centered", coef: float = 1e-3, *, passes: bool = True, verdict: VerdictName = "inconclusive"
) -> JudgedArm:
    found = QualityVerdict(method, coef, delta_ppl=0.0, accepted=None, verdict=verdict, reasons=())
    return JudgedArm(found, 0.0, 0.9, 0.8, "" if passes else "ΔCE is above the tolerance")


HEAD = arm("centered-head", 0.0, verdict="accepted")


@pytest.mark.parametrize(
    ("chosen", "confirmed", "head", "wanted"),
    [
        (arm(), arm(verdict="accepted"), None, ("confirmed here", "centered", 1e-3)),
        (arm(), arm(), HEAD, ("direction only", "centered", 1e-3)),
        (arm(), arm(passes=False), None, ("undecided", None, None)),
        (arm(), arm(passes=False), HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(passes=False), arm(passes=False, verdict="rejected"), None, ("confirmed here", "ce", 0.0)),
        (arm(passes=False), arm(passes=False), None, ("direction only", "ce", 0.0)),
        (arm(passes=False), arm(), None, ("undecided", None, None)),
        (arm(passes=False), arm(passes=False), HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(passes=False), arm(), HEAD, ("confirmed here", "centered-head", 0.0)),
        (HEAD, HEAD, HEAD, ("confirmed here", "centered-head", 0.0)),
        (arm(), None, None, ("undecided", None, None)),
        (None, None, None, ("undecided", None, None)),
    ],
)
def test_every_row_of_the_table(
    chosen: JudgedArm | None,
    confirmed: JudgedArm | None,
    head: JudgedArm | None,
    wanted: tuple[str, str | None, float | None],
) -> None:
    found = decide_answer(chosen, confirmed, head, diagnosed=True)
    assert (found.level, found.method, found.coef) == wanted
    assert found.why.endswith(".") or ":" in found.why


def test_the_guide_had_other_rows_than_the_rule() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "recommend.md").read_text(encoding="utf-8")
    rows = [line for line in (answer.__doc__ or "").splitlines() if line.startswith("| ") and "| answer |" not in line]
    assert len(rows) == 9
    for row in rows:
        assert row.replace("what one has", "what you have") in guide, row


def test_where_every_arm_was_stopped_no_z_loss_is_an_answer() -> None:
    assert decide_answer(None, None, None, diagnosed=True, stopped=2).method == "ce"
    assert decide_answer(None, None, HEAD, diagnosed=True, stopped=2).method == "centered-head"


def test_without_a_diagnosis_the_answer_is_no_z_loss() -> None:
    found = decide_answer(arm(), arm(verdict="accepted"), None, diagnosed=False)
    assert (found.level, found.method) == ("direction only", "ce")
    rejected = decide_answer(arm(), arm(passes=False, verdict="rejected"), None, diagnosed=False)
    assert rejected.level == "confirmed here"


def test_arms_that_pass_come_first_by_what_reaches_the_hidden_state() -> None:
    small, large = replace(arm("a"), transported=0.5), replace(arm("b"), transported=0.9)
    near, far = replace(arm("c", passes=False), delta_ce=0.01), replace(arm("d", passes=False), delta_ce=0.5)
    assert [one.key[0] for one in ranked((far, large, near, small))] == ["a", "b", "c", "d"]


def test_a_verdict_that_rejects_never_passes(comparison: Comparison) -> None:
    judged = judge_arms(comparison)
    for one in judged:
        if one.verdict.verdict == "rejected":
            assert not one.passes
            assert one.objection.startswith("rejected")
