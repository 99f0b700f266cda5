"""What a reader sees first, and what keeps results from being misread: answers, other texts, capped gains, small shares."""

from __future__ import annotations

import html
from dataclasses import replace

import pytest

from tests.measured_reports import weighed
from tests.report.printing import joined, printed
from zloss.decide.answer import decide_results
from zloss.decide.decision_map import with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.report.audit import (
    audit_summary,
    decision_document,
    differences,
    remarks,
    side_by_side_document,
    tally,
)
from zloss.report.comparison import answer
from zloss.report.document import Cell, Item, Items, Table, Text
from zloss.report.files import render_page, terminal_document
from zloss.report.html import to_page
from zloss.report.logprobs import logprob_document
from zloss.report.loss_audit import bottom_line, headline, loss_audit_summary, what_to_do
from zloss.results.audit import AuditReport, GradientNumbers, HeadNumbers, PlannedLoss
from zloss.results.comparison import Comparison
from zloss.results.logprobs import LogprobGap, LogprobNoise
from zloss.results.loss_audit import Finding, LossAudit, Severity

CAPPED = "softcapped logits are not shift-invariant, so μ and the centered head are undefined"


@pytest.fixture
def capped(bare: AuditReport) -> AuditReport:
    """The report of a model with a softcap, without μ and the centered head."""
    return with_decisions(
        replace(
            bare,
            model=replace(bare.model, softcap=30.0, rows_beyond_tokenizer=12),
            mu_abs_99=None,
            heads=replace(bare.heads, raw=replace(bare.heads.raw, mu_abs_99=None, mu_rms=None), centered=HeadNumbers()),
            reasons=dict.fromkeys(("heads.centered", "heads.raw.mu_abs_99", "heads.raw.mu_rms"), CAPPED),
        )
    )


def test_audits_of_different_texts_or_sizes_say_so(report: AuditReport, other: AuditReport) -> None:
    assert differences([("a", report), ("b", other)]) == []
    longer = replace(other, corpus=replace(other.corpus, blocks=2 * other.corpus.blocks))
    moved = replace(other, corpus=replace(other.corpus, name="other.txt"))
    rescaled = replace(other, diag_coef=1e-3)
    for changed, said in (
        (longer, "Not on the same text"),
        (moved, "Not on the same text"),
        (rescaled, "λ_diag, which differs"),
    ):
        (sentence,) = differences([("a", report), ("b", changed)])
        assert said in sentence
    assert "Not on the same text" in printed(side_by_side_document([("a", report), ("b", moved)]))
    assert "Not on the same text" in render_page(decide_results(audits=(report, moved)))


def test_what_an_audit_left_out_names_its_command_unless_no_audit_could_measure_it(
    capped: AuditReport, bare: AuditReport
) -> None:
    left_out = replace(bare, tied_paths=None, reasons={"tied_paths": "skipped (gradient_blocks = 0)"})
    decisions = {one.stage: one for one in (*with_decisions(left_out).decisions, *capped.decisions[:2])}
    assert "zloss audit MODEL" in decisions["Shared pathway"].reason
    for stage in ("Source coordinate", "Objective decomposition"):
        assert decisions[stage].fired is None
        assert "not shift-invariant" in decisions[stage].reason
        assert "To evaluate this stage" not in decisions[stage].reason
        assert "cannot evaluate this stage here" in decisions[stage].reason


def test_pages_and_terminals_begin_with_the_answer(
    report: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    results = decide_results(loss_audits=(loss_audit,), comparisons=(comparison,))
    first = {"page": render_page(results), "terminal": joined(terminal_document(results))}
    assert loss_audit.found
    for said in (" ".join(headline(loss_audit).split())[:40], answer(results.comparisons[0])[:20], "What to do:"):
        assert first["terminal"].index(said) < first["terminal"].index("Decision map")
        assert first["page"].index(html.escape(said)) < first["page"].index("Decision map</h2>")
    assert first["page"].index("Verdicts</h3>") < first["page"].index("Decision map</h2>")
    assert "heavy" in answer(comparison)
    assert "What to do" not in joined(loss_audit_summary(replace(loss_audit, findings=())))
    page = render_page(decide_results(audits=(report,)))
    assert report.verdict is not None
    assert page.index(report.verdict.sentence[:20]) < page.index('class="cards"')


def test_a_loss_audit_says_what_is_wrong_and_one_fix_per_finding(loss_audit: LossAudit) -> None:
    """A detached Z was to be fixed in the backward pass, and a fix of a warning came first."""

    def advised(*found: tuple[str, Severity], has_z: bool | None = True) -> tuple[str, list[str]]:
        findings = tuple(Finding(id, "finding", "", severity=severity, remedy="repair it") for id, severity in found)
        identified = replace(loss_audit.identified, has_z=has_z)
        audit = replace(loss_audit, findings=findings, identified=identified)
        return bottom_line(audit)[0], [fix.partition(":")[0] for fix in what_to_do(audit)]

    opening, fixes = advised(("forward_backward_mismatch", "error"), ("zero_gradient_z", "error"), has_z=False)
    assert opening.startswith("Fix this loss before you train with it: 2 errors (forward_backward_mismatch, zero")
    assert fixes == ["zero_gradient_z, forward_backward_mismatch"]
    _, fixes = advised(
        ("overwrites_input", "warning"), ("forward_backward_mismatch", "error"), ("differs_from_expected", "error")
    )
    assert fixes == ["forward_backward_mismatch", "differs_from_expected", "overwrites_input"]
    opening, _ = advised(("reported_z_no_gradient", "note"))
    assert opening == "No errors in what this loss trains; 1 note (reported_z_no_gradient)."


def test_a_finding_is_shown_with_its_consequence_and_its_remedy(loss_audit: LossAudit) -> None:
    wrong = Finding("counted_twice", "finding", "Twice.", severity="error", remedy="add it once", consequence="λ is 2λ")
    audit = replace(loss_audit, findings=(wrong,))
    assert what_to_do(audit) == ["counted_twice: add it once."]
    assert "Twice. Consequence: λ is 2λ." in " ".join(joined(loss_audit_summary(audit)).split())
    assert "Consequence: λ is 2λ." in render_page(decide_results(loss_audits=(audit,)))


def test_a_scaled_loss_is_shown_with_its_coefficient_relative_to_cross_entropy(loss_audit: LossAudit) -> None:
    got = replace(loss_audit.identified, ce_scale=0.125, coef=1e-4)
    line = headline(replace(loss_audit, identified=got))
    assert "CE over valid tokens (scaled by 0.125)" in line
    assert "λ = 0.0001 (0.0008 relative to CE)" in line
    both = replace(got, ce_scale=0.9, extra={"or_label_smoothing": 0.1, "or_target": 50.0})
    assert "Label smoothing 0.1 with c = 50 has the same gradient." in headline(replace(loss_audit, identified=both))


def test_the_card_of_r_z_is_about_the_run_of_the_verdict(report: AuditReport) -> None:
    """At λ_diag it was within the budget, next to a verdict that called the planned λ too strong."""
    lead = "At λ = 0.02 the Z gradient of the whole model is"
    for share, said in (
        (0.2, f"{lead} 20 % of its CE gradient, beyond"),
        (0.001, f"{lead} 0.10 % of its CE gradient, within"),
    ):
        planned = PlannedLoss(coef=0.02, target=0.0, r_z=share / 2, r_z_model=share)
        assert said in render_page(decide_results(audits=(replace(report, planned=planned),)))


def test_a_softcapped_head_has_its_own_gain_and_every_row_counts(capped: AuditReport, report: AuditReport) -> None:
    text = joined(audit_summary(capped, verbose=True))
    assert "A_p^99, capped: p99 output-to-hidden gain through the softcap" in text
    assert "12 rows beyond the tokenizer" in text
    assert "through the softcap" in render_page(decide_results(audits=(capped,)))
    assert "capped" not in joined(audit_summary(report, verbose=True))


def test_a_small_share_keeps_its_digits(report: AuditReport) -> None:
    assert report.gradient is not None
    small = replace(report, gradient=replace(report.gradient, raw=GradientNumbers(3.4e-5, 0.1)))
    assert "the Z gradient of the head alone is 0.0034 % of the CE gradient" in remarks(small)[0]


def test_a_page_has_one_limit_of_lambda(bare: AuditReport) -> None:
    """It advised 7e-05 for the whole model in its verdict, and 4.65e-4 for the head among the numbers."""
    audited = with_decisions(weighed(bare, r_z=0.08, r_z_model=0.2))
    assert audited.verdict is not None
    assert audited.verdict.if_trained is not None
    page = render_page(decide_results(audits=(audited,)))
    assert "Keep λ at 2e-5 or below" in audited.verdict.if_trained[0]
    assert "The limit of λ is 2e-5," in " ".join(remarks(audited))
    assert "not a limit of λ" in page
    assert "usual range" not in page


def stages_of(report: AuditReport) -> tuple[Item, ...]:
    (stages,) = (block for block in decision_document(report.decisions, Text("")) if isinstance(block, Items))
    return stages.items


def test_a_stage_that_fired_harmlessly_says_what_is_large_and_why_it_is_harmless(bare: AuditReport) -> None:
    limits = Thresholds(shift_over_log_v=0, gain_99=0, input_path_ratio=0, component_share=0)
    found = with_decisions(weighed(bare), thresholds=limits)
    fired = [(item, one) for item, one in zip(stages_of(found), found.decisions, strict=False) if one.fired]
    assert len(fired) >= 3
    for item, one in fired:
        assert one.consequence is not None
        assert (item.word, item.tone, item.expanded) == ("fired", "harmless", False)
        assert item.text == f"Large, but harmless here: {one.reason} {one.consequence.reason}"
        # "→ Deploy the row-centered head" was below a verdict that nothing calls for one.
        assert item.more[0] == (f"If it mattered: {one.action}", "soft")
    assert len({item.text for item, _ in fired}) == len(fired)
    assert "all harmless here" in tally(found.decisions)
    page = render_page(decide_results(audits=(found,)))
    assert "Too small to matter" not in page
    mattering = with_decisions(weighed(bare, noise=(0.24, 0.02)), thresholds=limits)
    first = stages_of(mattering)[0]
    assert (first.tone, first.expanded) == ("fired", True)
    assert first.more[0][0].startswith("→ ")


def test_a_model_without_a_router_has_seven_stages(report: AuditReport) -> None:
    (router,) = (item for item in stages_of(report) if "Router" in item.name)
    assert (router.word, router.tone) == ("not applicable", "open")
    assert " of 7 stages that apply" in tally(report.decisions)
    assert "1 not applicable" in tally(report.decisions)
    (decision,) = (one for one in report.decisions if one.stage == "Router reduction")
    assert decision.fired is None


def test_the_log_probabilities_say_which_rows_the_verdict_uses_and_where_centering_hurts() -> None:
    gap = LogprobGap(512, 0, 0.02, 0.05, 0.0, 0.0, 0.5, 0.5, 0.5)
    errors = {
        ("storage", "raw"): 0.03,
        ("storage", "centered"): 0.02,
        ("operands", "raw"): 0.01,
        ("operands", "centered"): 0.02,
    }
    rows = [LogprobNoise("bf16", case, head, replace(gap, rms=rms), None, None) for (case, head), rms in errors.items()]
    said = joined(logprob_document(rows, verdict_format="bf16"))
    assert "The verdict uses the RMS of the bf16 rows in which only the logits are rounded" in said
    assert (
        "Where inputs and head are rounded to bf16, the error of the centered head is larger: 0.02 nat, 0.01 nat as it is."
        in said
    )
    assert said.count("the error of the centered head is larger") == 1
    assert "The verdict uses" not in joined(logprob_document(rows))
    page = to_page(logprob_document(rows), "t")
    assert "<b>on policy</b>: RMS of δ for tokens that the model itself samples" in page
    assert '<table class="sortable stacked logprobs">' in page


def test_the_largest_gap_of_a_sequence_may_be_negative() -> None:
    gap = LogprobGap(
        6, 0, 0.02, 0.05, 0.0, 0.0, 0.5, 0.5, 0.5, sequence_tokens=(2, 2, 2), sequence_sums=(0.1, -0.4, 0.2)
    )
    blocks = logprob_document([LogprobNoise("bf16", "storage", "raw", gap, None, None)])
    (shown,) = (block for block in blocks if isinstance(block, Table))
    found = dict(zip((column.title for column in shown.columns), shown.rows[0], strict=True))["Σδ"]
    assert isinstance(found, Cell)
    assert found.value == 0.4


def test_the_file_of_a_gguf_model_and_its_format_are_named(report: AuditReport) -> None:
    extra = {"source": "gguf:Small-Instruct.Q4_1.gguf", "dtype": "fp32"}
    text = joined(audit_summary(replace(report, model=replace(report.model, extra=extra))))
    assert "`Small-Instruct.Q4_1.gguf` · stored as Q4_1 ·" in text
    unnamed = replace(report, model=replace(report.model, extra={"source": "gguf:small.gguf"}))
    assert "`small.gguf` · stored as GGUF ·" in joined(audit_summary(unnamed))
