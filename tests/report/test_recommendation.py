"""A recommendation on the page, on a terminal of 80 columns, and beside other results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.decide.made_up_recommendation import made_up_plan, made_up_recommendation
from tests.report.printing import printed
from zloss.decide.answer import decide_results
from zloss.report.files import render_page, write_result
from zloss.report.recommendation import plan_summary, recommendation_summary, seeds_sentence
from zloss.results.audit import AuditReport
from zloss.results.files import load_results
from zloss.results.recommendation import NOT_TESTED


def test_the_page_says_what_to_do_how_sure_why_and_what_to_paste() -> None:
    found = made_up_recommendation()
    text = render_page(decide_results(recommendations=(found,)))
    assert "Recommendation for tiny &lt;model&gt;" in text
    for part in (
        "direction only",
        NOT_TESTED,
        "What it costs",
        "What is not guaranteed",
        "Decision map",
        "Confirmation",
    ):
        assert part in text, part
    assert text.count('<details class="decision') == 8
    assert "objective = zloss.CenteredZLoss(coef=0.001)" in text
    assert "the nearest setting" in text
    assert "inconclusive" in text
    assert "left out" in text
    assert "<model>" not in text


def test_the_page_of_an_undecided_answer_has_nothing_to_paste() -> None:
    found = replace(
        made_up_recommendation(), objective=None, coef=None, level="undecided", paste=(), confirmation=(), notes=()
    )
    text = render_page(decide_results(recommendations=(found,)))
    assert "Lines to paste" not in text
    assert "undecided" in text


def test_a_terminal_of_eighty_columns_has_it_all() -> None:
    text = printed(recommendation_summary(made_up_recommendation()))
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    for part in (
        "Train with Centered Z-loss, λ = 0.001",
        "direction only",
        "not guaranteed",
        "Quality gate",
        "stopped",
    ):
        assert part in joined, part
    assert "Liger, the nearest setting" in joined
    assert "40 min 12 s of 45 min 0 s" in joined


def test_a_plan_shows_its_arms_as_settings() -> None:
    text = printed(plan_summary(made_up_plan()))
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert "zloss.CrossEntropy()" in joined
    assert "lr 5e-05" in joined
    assert "the first selects, the others confirm" in joined


def test_the_files_are_read_back_and_joined_with_an_audit(report: AuditReport, tmp_path: Path) -> None:
    found = made_up_recommendation()
    written = write_result(tmp_path, decide_results(recommendations=(found,)))
    assert [path.name for path in written] == ["recommendation.json", "report.html"]
    (result,) = load_results([tmp_path])
    assert (result.kind, result.record) == ("recommendation", found)
    page = render_page(decide_results((report,), recommendations=(found,)))
    assert report.model.name in page
    assert "What is not guaranteed" in page


def test_a_centered_head_that_passes_without_a_shift_is_explained() -> None:
    found = made_up_recommendation()
    head = replace(found.arms[0], method="centered-head", coef=0.0, state="passed")
    stages = tuple(replace(stage, fired=stage.stage == "Shared pathway") for stage in found.stages)
    said = "centered-head is proposed only where Source coordinate fired"
    assert said in seeds_sentence(replace(found, arms=(head,), stages=stages))
    fired = tuple(replace(stage, fired=True) for stage in found.stages)
    assert said not in seeds_sentence(replace(found, arms=(head,), stages=fired))
