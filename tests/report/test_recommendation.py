"""A recommendation on the page, on a terminal of 80 columns, and next to other results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_plan, made_up_recommendation
from tests.report.printing import printed
from zloss.decide.answer import decide_results
from zloss.decide.recommend import with_verdict
from zloss.decide.stages import STAGES
from zloss.report.document import Table, walk
from zloss.report.files import render_page, write_result
from zloss.report.recommendation import plan_summary, recommendation_summary, seeds_sentence
from zloss.results.audit import AuditReport
from zloss.results.decision import Consequence
from zloss.results.files import load_results
from zloss.results.recommendation import Level, Recommendation

SENTENCE = "Train with Centered Z-loss at λ = 1e-3, c = log V."


def test_the_page_opens_with_the_verdict_and_everything_below_agrees() -> None:
    found = made_up_recommendation()
    text = render_page(decide_results(recommendations=(found,)))
    assert "Recommendation for tiny &lt;model&gt;" in text
    places = [
        text.index(part)
        for part in (SENTENCE, "How sure", "Lines to paste", ">Arms<", ">Confirmation<", ">Decision map<")
    ]
    assert places == sorted(places)
    assert text.count(SENTENCE) == 1
    assert "First:" not in text
    assert all(stage.name in text for stage in STAGES)
    assert "objective = zloss.CenteredZLoss(coef=0.001)" in text
    # No block that looks like the recipe where a framework cannot express it.
    assert (
        "No setting of these frameworks expresses it: Liger (its Z is λ(log Z)²); Megatron-LM (routers only)." in text
    )
    assert "lse_square_scale" not in text
    assert "<model>" not in text
    # One row per arm has both words, and none of the words that once contradicted each other.
    arms = text[text.index(">Arms<") : text.index(">Confirmation<")]
    for word in (">passed<", ">accepted<", ">stopped<", "Left out ("):
        assert word in arms, word
    assert ">chosen<" not in arms
    assert ">failed<" not in arms


@pytest.mark.parametrize(
    ("objective", "level", "sentence"),
    [
        (None, "undecided", "Not enough evidence: the runs did not decide."),
        ("ce", "confirmed here", "Use no Z-loss: train with plain cross-entropy."),
        ("centered", "direction only", "Not enough evidence to train with Centered Z-loss at λ = 1e-3, c = log V"),
    ],
)
def test_a_page_that_says_not_to_train_has_nothing_to_paste(objective: str | None, level: Level, sentence: str) -> None:
    found = with_verdict(replace(made_up_recommendation(), objective=objective, level=level))
    assert found.paste == ()
    text = render_page(decide_results(recommendations=(found,)))
    assert "Lines to paste" not in text
    assert sentence in text
    assert "Train with" not in text


def test_a_terminal_of_eighty_columns_opens_with_the_verdict_in_25_lines() -> None:
    found = made_up_recommendation()
    text, whole = (printed(recommendation_summary(found, verbose=verbose)) for verbose in (False, True))
    for shown in (text, whole):
        assert max(map(len, shown.splitlines())) <= 80
        assert " ".join(shown.split()).startswith(f"tiny <model> {SENTENCE} Why Centered on confirmation")
    assert len(text.strip().splitlines()) <= 25
    joined, all_of_it = " ".join(text.split()), " ".join(whole.split())
    assert "40 min 12 s of 45 min 0 s. Arms, stages and all lines to paste: --verbose" in joined
    assert "objective = zloss.CenteredZLoss(coef=0.001)" in joined
    assert "It does not promise a smaller A_p^99." in joined
    assert "Liger" not in joined
    for part in ("Liger (its Z is", "Quality gate", "stopped", "no room for seed 4"):
        assert part in all_of_it, part


def test_a_plan_shows_its_arms_as_settings() -> None:
    text = printed(plan_summary(made_up_plan()))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("zloss.CrossEntropy()", "lr 5e-05", "the first selects, the others confirm"):
        assert part in " ".join(text.split())


def test_the_files_are_read_back_and_joined_with_an_audit(report: AuditReport, tmp_path: Path) -> None:
    found = made_up_recommendation()
    written = write_result(tmp_path, decide_results(recommendations=(found,)))
    assert [path.name for path in written] == ["recommendation.json", "report.html"]
    assert [(one.kind, one.record) for one in load_results([tmp_path])] == [("recommendation", found)]
    page = render_page(decide_results((report,), recommendations=(found,)))
    assert report.model.name in page
    assert SENTENCE in page


def written_before_0_3(**changes: str) -> dict[str, Any]:
    """A file of 0.2: `chosen` with `changes`, next to a Centered head that `failed` and that confirmation accepted."""
    data = made_up_recommendation().to_dict()
    data |= {"action": "Train.", "confidence": "direction only", "level": "direction only"}
    del data["verdict"], data["tested"]["known"], data["tested"]["assumed"]
    for arm in data["arms"]:
        del arm["confirmed"]
    chosen, (verdict,) = data["arms"][0], data["confirmation"]
    head = {"method": "centered-head", "coef": 0.0}
    chosen |= {"state": "chosen", **changes}
    data["arms"].insert(0, {**chosen, **head, "state": "failed", "reason": "p99 ‖δ_u‖ as deployed is × 23 that of CE"})
    data["confirmation"] = [{**verdict, **head}, {**verdict, "verdict": "inconclusive", "accepted": None}]
    return data


@pytest.mark.parametrize(
    ("reason", "state"), [("passes selection", "passed"), ("ΔCE is above the tolerance", "not passed")]
)
def test_a_file_from_before_0_3_opens_with_a_verdict_and_one_meaning_per_state(reason: str, state: str) -> None:
    """An arm was "chosen" without passing, or "failed" next to a confirmation that "accepted" it."""
    found = Recommendation.from_dict(written_before_0_3(reason=reason))
    states = [(arm.method, arm.state, arm.confirmed) for arm in found.arms]
    assert states[:2] == [("centered-head", "not passed", None), ("centered", state, "inconclusive")]
    assert [arm.state for arm in found.arms[2:]] == ["stopped", "left out"]
    assert [one.method for one in found.confirmation] == ["centered"]
    for text in (printed(recommendation_summary(found)), render_page(decide_results(recommendations=(found,)))):
        assert "Not enough evidence to train with Centered Z-loss at λ = 1e-3" in " ".join(text.split())
        assert "Lines to paste" not in text


def test_an_old_answer_that_was_not_the_chosen_arm_keeps_its_confirmation() -> None:
    found = Recommendation.from_dict(written_before_0_3() | {"objective": "centered-head", "coef": 0.0})
    assert [arm.confirmed for arm in found.arms[:2]] == ["accepted", "inconclusive"]
    assert [one.method for one in found.confirmation] == ["centered-head", "centered"]


def test_without_a_shift_the_arms_do_not_list_a_centered_head() -> None:
    """ "not passed: p99 ‖δ_u‖ as deployed is × 5.985 that of CE" was about an arm that nothing had proposed."""
    found = made_up_recommendation()
    head = replace(found.arms[0], method="centered-head", coef=0.0, confirmed=None, state="not passed")
    for fired in (False, True):
        stages = tuple(replace(stage, fired=fired) for stage in found.stages)
        document = recommendation_summary(replace(found, arms=(head, *found.arms), stages=stages), verbose=True)
        (arms,) = (block for block in walk(document) if isinstance(block, Table) and block.name == "arms")
        assert len(arms.rows) == 2 + fired
        assert ("Centered head" in printed(document)) is fired
        assert [column.title for column in arms.columns][3] == "ΔCE\nseed 1"


def test_a_centered_head_that_passes_without_a_shift_is_explained() -> None:
    found = made_up_recommendation()
    head = replace(found.arms[0], method="centered-head", coef=0.0, confirmed=None)
    harmless = Consequence("noise", 0.001, 0.01, "nat", False, "It is small.")
    stages = tuple(replace(stage, fired=True, consequence=harmless) for stage in found.stages)
    said = "Centered head is proposed only where Source coordinate fired and matters"
    assert said in seeds_sentence(replace(found, arms=(head,), stages=stages))
    assert said not in seeds_sentence(replace(found, arms=(replace(head, confirmed="accepted"),), stages=stages))
