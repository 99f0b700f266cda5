"""The page as text: escaped, self-contained, under its size, complete without a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from dataclasses import replace

import pytest

from tests.decide.made_up_drift import made_up_drift
from tests.decide.made_up_recommendation import made_up_recommendation
from tests.laws.example_results import DOCUMENTED, example_results
from zloss.decide.answer import audit_names, decide_results
from zloss.decide.stages import STAGES
from zloss.report.document import Cell, Column, Heading, Plain, Table, Terms, Text
from zloss.report.files import notebook_html, render_page
from zloss.report.html import MAX_BYTES, prose, to_page
from zloss.results.audit import AuditReport, ExtremeTable, ExtremeToken, Figures, HeadNumbers, Heads, Nonfinite
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.loss_audit import Finding, LossAudit
from zloss.results.record import ResultRecord
from zloss.results.reproduction import Choice, ReproductionRecord
from zloss.results.router import MeasuredScale
from zloss.router.conventions import RouterConvention, router_scale_table

COMMITTED = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


def hostile(report: AuditReport) -> AuditReport:
    token = ExtremeToken(0, 1, HOSTILE, HOSTILE)
    return replace(
        report,
        model=replace(report.model, name=HOSTILE, extra={HOSTILE: HOSTILE}),
        corpus=replace(report.corpus, name=HOSTILE),
        extreme_tokens=(ExtremeTable("gain", "raw", (token,)),),
        reasons={"figures.geometry": HOSTILE},
    )


def hostile_reproduction() -> ReproductionRecord:
    record = read_record(DOCUMENTED / "tab_pretrained.json", ReproductionRecord)
    claim = replace(record.claims[0], statement=HOSTILE, evidence=HOSTILE, reading=HOSTILE)
    line = replace(record.rows[0], extra={**record.rows[0].extra, "model": HOSTILE}, deviations=(HOSTILE,))
    choices = (Choice(setting=HOSTILE, ours=HOSTILE),)
    return replace(
        record, label=HOSTILE, title=HOSTILE, claims=(claim,), rows=(line,), notes=(HOSTILE,),
        not_stated_by_the_paper=choices,
    )  # fmt: skip


def test_text_from_outside_is_escaped_everywhere(report: AuditReport, loss_audit: LossAudit) -> None:
    mine = RouterConvention(HOSTILE, token_count="layer_tokens", layer_divisor="none", cited=HOSTILE)
    verdict = {"method": HOSTILE, "coef": 0.0, "delta_ppl": None, "accepted": False, "reason": HOSTILE}
    comparison = {
        "schema": Comparison.SCHEMA,
        "baseline": "ce",
        "seeds": [],
        "methods": [],
        "quality": {"tolerance_ppl": None, "methods": [verdict]},
        HOSTILE: HOSTILE,
    }
    curves = tuple(replace(curve, name=HOSTILE) for curve in COMMITTED.curves[:1])
    drift, found = made_up_drift((2.0, 2.0, 9.0)), made_up_recommendation()
    text = render_page(
        decide_results(
            audits=(hostile(report), hostile(report)),
            loss_audits=(replace(loss_audit, provenance={"loss": HOSTILE, HOSTILE: HOSTILE}),),
            comparisons=(replace(Comparison.from_dict(comparison), curves=curves),),
            router_scales=(router_scale_table(1.0, mine, layers=2, top_k=1, tokens=8),),
            measured_routers=(MeasuredScale(1.0, 0.0, (1.0,), 1.0, 1.0, (1.0,), None, 0.0, name=HOSTILE),),
            reproductions=(hostile_reproduction(),),
            drifts=(replace(drift, model=HOSTILE, finding=HOSTILE, notes=(HOSTILE,)),),
            recommendations=(replace(found, action=HOSTILE, paste=(replace(found.paste[0], lines=HOSTILE),)),),
        )
    )
    own, data = scripts(text)
    assert len(own) == 2
    for script in own:
        text = text.replace(script, "")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "{{ 7*7 }}" in text
    assert text.count("<script>") == 2
    assert text.count("</script>") == 2 + len(data)
    # Names of series stand in the data of figures too, where nothing can end their element.
    assert any("alert(1)" in island for island in data)
    assert not any("<" in island for island in data)


def scripts(text: str) -> tuple[list[str], list[str]]:
    """The page's own scripts, and the data of its figures."""
    own = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    return own, re.findall(r'<script type="application/json">(.*?)</script>', text, flags=re.DOTALL)


def test_a_page_holds_all_it_needs_and_its_policy_allows_nothing_else(report: AuditReport) -> None:
    """It allowed every inline style and script, so an escape that was forgotten would have run."""
    text = render_page(decide_results(audits=(report,), comparisons=(COMMITTED,)))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert "unsafe" not in policy
    assert parts["base-uri"] == parts["form-action"] == parts["default-src"] == "'none'"
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    own, data = scripts(text)
    for name, contents in (("style", [style]), ("script", own)):
        checksums = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert parts[f"{name}-src"] == " ".join(f"'sha256-{checksum}'" for checksum in checksums)
    assert not re.findall(r"\sstyle=|\son\w+=", text[text.index("<body>") :])
    # The drawing library names the addresses of its schema and its editor; the policy lets it ask for none.
    text = text.replace(own[0], "")
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", text)
    assert not re.findall(r"url\((?!#)|@import|https?://", text)
    assert len(data) == 9 + 3
    for island in data:
        assert json.loads(island)["layer"]
        # Light and dark are the style sheet's business.
        assert "var(--ink)" in island


def example(kind: str) -> ResultRecord:
    return next(one for one in example_results().values() if one.SCHEMA.startswith(f"zloss.{kind}/"))


@pytest.mark.parametrize("kind", ["loss-audit", "router-scale", "recommendation", "reproduction"])
def test_a_page_without_figures_is_small_and_needs_no_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert len(notebook_html(example(kind)) or "x" * 150_000) < 150_000
    assert example("decisions")._repr_html_() is None  # a record without a page


def test_the_curve_of_a_loss_audit_is_a_table_on_a_base_install(
    loss_audit: LossAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = replace(loss_audit, identified=replace(loss_audit.identified, curve=((3.25, 0.125), (4.5, 0.375))))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    text = render_page(decide_results(loss_audits=(curve,)))
    assert all(part in text for part in ("Measured points of the penalty", "3.25", "0.375"))
    assert "vl-convert-python" not in text


def test_without_vl_convert_a_page_says_so_and_is_complete_but_for_figures(
    report: AuditReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    text = render_page(decide_results(audits=(report,)))
    assert text.count("vl-convert-python") == 1
    assert [len(found) for found in scripts(text)] == [1, 0]
    assert all(part in text for part in ("zloss[audit]", "Gradient geometry", "All numbers"))


@pytest.mark.parametrize("kind", ["audit", "comparison", "drift", "implementation-audit", "measured-router-scale"])
def test_a_notebook_shows_a_result_without_scripts(kind: str) -> None:
    shown = example(kind)._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe sandbox ")
    page = html.unescape(shown.partition('srcdoc="')[2].rpartition('"')[0])
    assert "<script" not in page
    assert "script-src 'none'" in page
    assert len(shown) < MAX_BYTES
    if kind in ("audit", "drift"):
        (picture, *_) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
        assert base64.b64decode(picture).startswith(b"<svg")


def test_many_full_audits_stay_under_three_megabytes(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    tuples = {name: value for name, value in vars(sample).items() if isinstance(value, tuple) and value}
    columns = {name: (value * 5000)[:5000] for name, value in tuples.items()}
    full = replace(report, figures=replace(report.figures, geometry=replace(sample, **columns)))
    # One page holds all tokens; twelve audits are thinned.
    for audits, thinned in ((1, False), (12, True)):
        text = render_page(decide_results(audits=(full,) * audits))
        assert len(text.encode()) < MAX_BYTES
        drawn = [int(n) for n in re.findall(r"(\d+) tokens drawn", text)]
        assert len(drawn) == audits
        assert (0 < drawn[0] < 5000) == thinned


def test_missing_parts_leave_their_reasons_not_holes(bare: AuditReport) -> None:
    poor = replace(
        bare,
        heads=Heads(replace(bare.heads.raw, mu_abs_99=None), HeadNumbers()),
        reasons={"heads": "softcap is not shift-invariant", "gradient": "interrupted before the gradient section"},
        gradient=None,
        tied_paths=None,
        figures=Figures(),
        extreme_tokens=(),
        status="partial",
        finished_blocks=3,
        nonfinite=Nonfinite(nan=2, inf=1),
        target=None,
    )
    text = render_page(decide_results(audits=(poor,)))
    for expected in (*poor.reasons.values(), "3 of 12 blocks", "--resume", "2 NaN, 1 Inf"):
        assert expected in text
    assert "None" not in re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert render_page(decide_results(audits=(poor, bare)))


def test_a_page_without_an_audit_has_the_map_the_verdicts_and_the_severity_of_findings(
    loss_audit: LossAudit, comparison: Comparison
) -> None:
    mild = Finding("all_ignored_nonfinite", "finding", "a batch without targets is NaN", None, "note")
    grave = Finding("counted_twice", "finding", "Z is added twice", None, "error")
    good = Finding("overflow", "pass", "large logits are finite")
    found = replace(loss_audit, findings=(good, mild, grave))
    text = render_page(decide_results(loss_audits=(found,), comparisons=(comparison,)))
    verdicts = re.findall(r'<td class="t tone-\w+" data-value="\d">([^<]+)</td>', text)
    assert verdicts == ["✗ error", "i note", "✓ pass"]
    assert "heavy, λ 1" in text
    # Stages that were not evaluated for one reason share a line, and each is named.
    lines = re.findall(r'<span class="stage">([^<]+)</span>', text)
    assert lines == ["Other checks", "Stages 1 to 4", "5. Implementation", *lines[3:]]
    assert all(stage.name in text for stage in STAGES)


def test_audits_of_one_model_are_told_apart(report: AuditReport, other: AuditReport) -> None:
    assert audit_names([report, other]) == ["tiny-tied", "tiny <other>"]
    moved = replace(report, corpus=replace(report.corpus, name="elsewhere"))
    assert audit_names([report, moved]) == ["tiny-tied · uniform random tokens", "tiny-tied · elsewhere"]
    assert len(set(audit_names([report, report]))) == 2


def test_control_characters_of_tokens_are_made_visible(report: AuditReport) -> None:
    extremes = (ExtremeTable("gain", "raw", (ExtremeToken(0, 1, "\x00\x1b[31m\x7f", "a\tb\r\n\ud83d\u202e"),)),)
    text = render_page(decide_results(audits=(replace(report, extreme_tokens=extremes),)))
    assert "<bdi>␀␛[31m␡</bdi>" in text
    assert "a⇥b␍⏎" in text
    assert "\x00" not in text


def test_every_block_has_its_form() -> None:
    table = Table(
        (Column("name", "text"), Column("size"), Column("why", "prose")),
        (("one", Cell("1.5", 1.5), Cell("it fits", tone="pass", mark="holds")), ("two", Cell("–"), "")),
        title="Sizes",
        note="A note.",
    )
    blocks = [
        Heading("Top", 1, "top", "Up"),
        Text("first", "item"),
        Text("second", "item"),
        Text("x = 1", "code"),
        table,
    ]
    page = to_page([*blocks, Terms((("key", "value"),)), Terms((("key", "value"),), "Titled")], "t")
    assert prose(Plain("x_train.txt `a`")) == "x_train.txt `a`"
    assert prose("5 < 6 & `<b>`") == "5 &lt; 6 &amp; <code>&lt;b&gt;</code>"
    for part in (
        '<a href="#top">Up</a>',
        '<h1 id="top">Top</h1>',
        "<ul><li>first</li>\n<li>second</li></ul>",
        "<pre>x = 1</pre>",
        '<td class="n" data-value="1.5" data-label="size">1.5</td>',
        '<td class="n" data-value="" data-label="size">–</td>',
        '<b class="tone-pass">holds</b> it fits',
        "<dl><dt>key</dt><dd>value</dd></dl>",
        '<h4>Titled</h4><table><tbody><tr><th scope="row">key</th><td>value</td>',
        '<p class="soft">A note.</p>',
    ):
        assert part in page, part
