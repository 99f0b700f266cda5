"""Raw and centered numbers of one model are two coordinates: side by side, and never held against each other as a gain."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from tests.measured_reports import weighed
from tests.report.printing import joined
from zloss.decide.answer import decide_results
from zloss.decide.decision_map import with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.report.audit import audit_document, audit_summary, side_by_side_document
from zloss.report.audit_figures import audit_figures
from zloss.report.comparison import comparison_document, comparison_summary
from zloss.report.document import Items, Table, walk
from zloss.report.files import notebook_html, render_page, terminal_document
from zloss.report.numbers import factor, number
from zloss.report.recommendation import recommendation_document, recommendation_summary
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit
from zloss.results.quantities import HEAD

OURS = "The stages are the paper's; thresholds, consequences and their limits are ours."


@pytest.fixture
def fired(bare: AuditReport) -> AuditReport:
    """A report whose first four stages all fired, with consequences that matter."""
    limits = Thresholds(shift_over_log_v=0, gain_99=0, input_path_ratio=0, component_share=0)
    return with_decisions(weighed(bare, noise=(0.24, 0.06), gain=0.2, input_path=0.1), thresholds=limits)


def shown(page: str) -> str:
    """The text of a page, without its scripts and its style sheet."""
    text = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def everywhere(report: AuditReport) -> dict[str, str]:
    """All that is shown of one audit: the page, the page in a notebook, the terminal."""
    results, notebook = decide_results(audits=(report,)), notebook_html(report)
    assert notebook is not None
    framed = html.unescape(notebook.partition('srcdoc="')[2].rpartition('"')[0])
    return {
        "page": shown(render_page(results)),
        "notebook": shown(framed),
        "terminal": joined(terminal_document(results)),
        "verbose": joined(audit_summary(report, verbose=True), 140),
        "side by side": joined(side_by_side_document([("one", report), ("another", report)]), 140),
    }


def test_raw_and_centered_numbers_had_a_ratio_an_arrow_and_lower_is_better(fired: AuditReport) -> None:
    raw, centered = fired.heads.raw, fired.heads.centered
    pairs = [(getattr(raw, one.key), getattr(centered, one.key)) for one in HEAD]
    assert fired.gradient is not None
    pairs.append((fired.gradient.raw.r_z, fired.gradient.centered.r_z))
    known = [(before, after) for before, after in pairs if before and after]
    assert len(known) > 10
    for place, text in everywhere(fired).items():
        said = re.search(
            r"(Lower|Higher) is|is better|centered / raw|[Cc]entering (raises|lowers|leaves|makes)|shortens|lengthens",
            text,
        )
        assert said is None, (place, said)
        for before, after in known:
            assert f"{number(before)} → {number(after)}" not in text, place
            # A single digit, such as that of ×1, is in other numbers too.
            ratio = factor(after / before)
            assert len(ratio) < 4 or ratio not in text, (place, ratio)


def test_both_numbers_stay_and_the_page_says_that_they_do_not_compare(fired: AuditReport) -> None:
    for place, text in everywhere(fired).items():
        for head in (fired.heads.raw, fired.heads.centered):
            assert number(head.p_z_999) in text or place == "terminal", place
        assert "so a difference between them is not a gain" in text or place == "terminal", place
    for figure in (figure for figures in audit_figures(fired).values() for figure in figures):
        if figure.name in ("rank16", "rays", "tail-gain", "sigma", "energy"):
            assert re.search(r"\d raw, .*\d centered", figure.caption), figure.name


def test_cards_drew_both_coordinates_as_bars_of_the_larger_value(fired: AuditReport) -> None:
    page = render_page(decide_results(audits=(fired,)))
    assert page.count('<article class="card"') == 6
    assert "width-" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).partition("<body>")[2]
    assert 'class="ratio' not in page


def test_a_stage_of_the_head_has_its_numbers_side_by_side_and_one_of_the_runs_keeps_its_direction(
    fired: AuditReport, comparison: Comparison
) -> None:
    (report,) = decide_results((fired,), comparisons=(comparison,)).audits
    document = list(walk(audit_document(report)))
    (stages,) = (block for block in document if isinstance(block, Items))
    tables = {
        item.name: block for item in stages.items for block in item.body if isinstance(block, Table) and block.rows
    }
    titles = {name: [column.title for column in table.columns] for name, table in tables.items()}
    assert titles["1. Source coordinate"] == ["quantity", "raw", "centered"]
    assert titles["3. Architectural transport"] == ["quantity", "before", "after"]
    # Two runs: CE and a method, in the coordinate of both.
    assert titles["7. Optimizer consequence"] == ["quantity", "before", "after", "change"]
    lines = {item.name: " ".join(line for line, _ in item.more) for item in stages.items}
    assert (
        f"{number(fired.heads.raw.p_z_999)} raw, {number(fired.heads.centered.p_z_999)} centered"
        in lines["1. Source coordinate"]
    )
    assert " → " in lines["7. Optimizer consequence"]


def test_every_decision_map_says_that_consequences_are_ours(
    fired: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    """Labels of the paper's tables were next to them."""
    found, unaudited = made_up_recommendation(), decide_results(loss_audits=(loss_audit,), comparisons=(comparison,))
    texts = {
        "page": shown(render_page(decide_results(audits=(fired,)))),
        "verbose": joined(audit_summary(fired, verbose=True)),
        "recommendation": shown(render_page(decide_results(recommendations=(found,)))),
        "map without an audit": shown(render_page(unaudited)),
        "the same on a terminal": joined(terminal_document(unaudited)),
    }
    for place, text in texts.items():
        assert text.count(OURS) == 1, place
    assert "Consequence (ours)" in texts["page"]


def test_an_arm_in_centered_logits_had_a_ratio_to_ce_in_raw_logits() -> None:
    found = made_up_recommendation()
    (centered, *rest), ratio = found.arms, 0.437
    arms = tuple(
        replace(centered, method=method, coef=coef, transported=ratio + place)
        for place, (method, coef) in enumerate((("centered", 1e-3), ("centered-head", 0.0), ("standard", 1e-3)))
    )
    stages = tuple(replace(stage, fired=True) for stage in found.stages)
    for make in (recommendation_document, lambda one: recommendation_summary(one, verbose=True)):
        document = make(replace(found, arms=(*arms, *rest), stages=stages))
        text = joined(document, 200)
        assert "× 0.437" not in text
        assert "× 1.44" not in text
        assert "× 2.44" in text
    assert "for an arm that deploys centered logits" in joined(recommendation_document(found))


def test_means_in_two_coordinates_say_so_on_every_output(comparison: Comparison) -> None:
    mixed = replace(
        comparison,
        methods=tuple(
            replace(method, coordinate="centered" if method.method == "heavy" else "raw")
            for method in comparison.methods
        ),
    )
    said = "Tails of raw and of centered logits are not comparable line by line"
    for document in (
        comparison_document(mixed),
        comparison_summary(mixed),
        comparison_summary(mixed, verbose=False),
    ):
        assert joined(document).count(said) == 1
    assert said not in joined(comparison_summary(comparison))
