"""The page as text: escaped, self-contained, under its size, complete without a browser."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.straight_histogram import count, log_edges
from zloss.decide.decided_results import audit_names, decide_results
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.svg import drawings
from zloss.report.charts.tails import tail_panels
from zloss.report.html import page as html
from zloss.report.html.page import render_page
from zloss.results.audit import AuditReport, HeadNumbers, Heads, Nonfinite, QuantileBound
from zloss.results.comparison import Comparison
from zloss.results.figure_data import DrawnHistogram, ExtremeTable, ExtremeToken, Figures
from zloss.results.loss_audit import Finding, LossAudit
from zloss.results.record import from_plain
from zloss.results.reproduction import Choice, ReproductionRecord, read_reproduction_record
from zloss.results.router import MeasuredScale
from zloss.router.conventions import RouterConvention, router_scale_table

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
    file = Path(__file__).parents[3] / "docs/results/tab_pretrained.json"
    record = read_reproduction_record(file)
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
    text = render_page(
        decide_results(
            audits=(hostile(report), hostile(report)),
            loss_audits=(replace(loss_audit, provenance={"loss": HOSTILE, HOSTILE: HOSTILE}),),
            comparisons=(Comparison.from_dict(comparison),),
            router_scales=(router_scale_table(1.0, mine, layers=2, top_k=1, tokens=8),),
            measured_routers=(MeasuredScale(1.0, 0.0, (1.0,), 1.0, 1.0, (1.0,), None, 0.0, name=HOSTILE),),
            reproductions=(hostile_reproduction(),),
        )
    )
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "{{ 7*7 }}" in text
    assert text.count("<script>") == 1
    assert text.count("</script>") == 1


def test_the_policy_allows_the_page_s_own_style_and_script_only(report: AuditReport, comparison: Comparison) -> None:
    """It allowed every inline style and script, so an escape that was forgotten would have run."""
    text = render_page(decide_results(audits=(report,), comparisons=(comparison,)))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert "unsafe" not in policy
    assert parts["base-uri"] == parts["form-action"] == parts["default-src"] == "'none'"
    for name in ("style", "script"):
        (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
        checksum = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert parts[f"{name}-src"] == f"'sha256-{checksum}'"
    body = text[text.index("<body>") :]
    assert not re.findall(r"\sstyle=|\son\w+=", body)


def test_the_page_refers_to_nothing_outside_itself(report: AuditReport) -> None:
    text = render_page(decide_results(audits=(report,)))
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)", text)
    assert not re.findall(r"url\((?!#)|@import|https?://", text)
    assert "default-src 'none'" in text


def test_many_full_audits_stay_under_three_megabytes(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    times = 5000 // len(sample) + 1
    columns = {
        name: (value * times)[:5000] for name, value in vars(sample).items() if isinstance(value, tuple) and value
    }
    full = replace(report, figures=replace(report.figures, geometry=replace(sample, **columns)))
    for audits in (1, 12):
        text = render_page(decide_results(audits=(full,) * audits))
        assert len(text.encode()) < html.MAX_BYTES
    # Thinning really happened, and kept the strongest token.
    drawn = [int(n) for n in re.findall(r"(\d+) tokens drawn", text)]
    assert len(drawn) == 12
    assert 0 < drawn[0] < 5000


def test_thinning_keeps_the_strongest_tokens(report: AuditReport) -> None:
    from zloss.report.html.thinning import thin

    thinned = thin(report, 0.1).figures.geometry
    sample = report.figures.geometry
    assert thinned is not None
    assert sample is not None
    assert 0.09 * len(sample) <= len(thinned) <= 0.12 * len(sample)
    strength = sorted(
        (max(pair) for pair in zip(sample.delta_u_raw, sample.delta_u_centered, strict=True)), reverse=True
    )
    kept = {max(pair) for pair in zip(thinned.delta_u_raw, thinned.delta_u_centered, strict=True)}
    assert set(strength[: len(sample) // 100]) <= kept
    assert {len(column) for column in vars(thinned).values() if isinstance(column, tuple)} == {len(thinned)}


def dots(svg: str, css: str) -> int:
    paths = ElementTree.fromstring(svg).iter("path")
    return sum(path.attrib["d"].count("M") for path in paths if path.attrib["class"] == f"dots {css}")


def test_every_sampled_token_is_drawn_once_in_each_coordinate(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    figures = drawings(geometry_panels(report), "x")
    assert len(figures) == 3
    for figure in figures:
        assert dots(figure.svg, "raw") == len(sample)
        assert dots(figure.svg, "centered") == len(sample)


def test_charts_are_well_formed_and_name_their_numbers(report: AuditReport) -> None:
    figures = [
        *drawings(geometry_panels(report), "x"),
        *drawings(tail_panels(report), "x"),
        *drawings(spectrum_panels(report), "x"),
    ]
    assert len(figures) == 9
    names = [ElementTree.fromstring(figure.svg).attrib["id"] for figure in figures]
    assert len(set(names)) == 9
    assert all("nan" not in figure.svg for figure in figures)


def test_rays_have_the_slope_of_their_label(report: AuditReport) -> None:
    svg = ElementTree.fromstring(drawings(geometry_panels(report), "x")[2].svg)
    (_, high_x, start_x, end_x, _), (_, high_y, start_y, end_y, _) = (
        [float(part) for part in svg.attrib[name].split()] for name in ("data-x", "data-y")
    )
    labels = [float(text.text or "") for text in svg.iter("text") if text.attrib["class"] == "ray-label"]
    rays = [path.attrib["d"] for path in svg.iter("path") if path.attrib["class"] == "line ray"]
    assert len(labels) == len(rays) >= 2
    for label, ray in zip(labels, rays, strict=True):
        x, y = (float(part) for part in ray.split("L")[1].split(","))
        slope = ((y - start_y) / (end_y - start_y) * high_y) / ((x - start_x) / (end_x - start_x) * high_x)
        assert slope == pytest.approx(label, rel=0.02)


def bars(report: AuditReport, *histograms: DrawnHistogram) -> list[list[str]]:
    figure = drawings(tail_panels(replace(report, figures=Figures(histograms=histograms))), "x")[0]
    paths = ElementTree.fromstring(figure.svg).iter("path")
    return [re.findall(r"V([\d.]+)H", path.attrib["d"]) for path in paths if "steps" in path.attrib["class"]]


def test_bins_that_do_not_nest_are_compared_per_unit(report: AuditReport) -> None:
    wide = DrawnHistogram("gain", "raw", (0.5, 4.5, 8.5), (40, 40))
    narrow = DrawnHistogram("gain", "centered", (0.0, 1.0, 2.0), (10, 10))
    # Ten tokens per unit in both: the same height although one count is four times the other.
    first, second = bars(report, wide, narrow)
    assert first == second


def test_nested_bins_are_added_up(report: AuditReport) -> None:
    wide = DrawnHistogram("gain", "raw", (0.0, 4.0, 8.0), (40, 40))
    narrow = DrawnHistogram("gain", "centered", (0.0, 1.0, 2.0, 3.0, 4.0), (10, 10, 15, 5))
    first, second = bars(report, wide, narrow)
    assert len(first) == len(second) == 2
    assert first[0] == second[0]


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
    for expected in (
        "softcap is not shift-invariant",
        "interrupted before the gradient section",
        "3 of 12 blocks",
        "--resume",
        "2 NaN, 1 Inf",
    ):
        assert expected in text
    assert "None" not in re.sub(r"<script>.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert render_page(decide_results(audits=(poor, bare)))


def test_bounds_of_sketched_quantiles_are_shown(report: AuditReport) -> None:
    value = report.heads.raw.p_z_999
    assert value is not None
    bound = QuantileBound(lower=value * 0.99, upper=value * 1.01, count=10**8)
    text = render_page(decide_results(audits=(replace(report, quantile_bounds={"heads.raw.p_z_999": bound}),)))
    assert "raw within" in text


def test_a_page_without_an_audit_shows_the_map_and_the_findings(loss_audit: LossAudit, comparison: Comparison) -> None:
    text = render_page(decide_results(loss_audits=(loss_audit,), comparisons=(comparison,)))
    assert "low_precision_source" in text
    assert "heavy, λ 1" in text
    assert text.count('<details class="decision') == 8


def test_a_loss_audit_shows_the_severity_of_its_findings(loss_audit: LossAudit) -> None:
    mild = Finding("all_ignored_nonfinite", "finding", "a batch without targets is NaN", None, "warning")
    grave = Finding("counted_twice", "finding", "Z is added twice", None, "error")
    good = Finding("overflow", "pass", "large logits are finite")
    text = render_page(decide_results(loss_audits=(replace(loss_audit, findings=(good, mild, grave)),)))
    found = re.findall(r'<td class="verdict-\w+"(?: data-severity="\w+")?>([\w ]+)</td>', text)
    assert found == ["error", "warning", "pass"]


def test_audits_of_one_model_are_told_apart(report: AuditReport, other: AuditReport) -> None:
    assert audit_names([report, other]) == ["tiny-tied", "tiny <other>"]
    moved = replace(report, corpus=replace(report.corpus, name="elsewhere"))
    assert audit_names([report, moved]) == ["tiny-tied · uniform random tokens", "tiny-tied · elsewhere"]
    assert len(set(audit_names([report, report]))) == 2


def test_control_characters_of_tokens_are_made_visible(report: AuditReport) -> None:
    token = ExtremeToken(0, 1, "\x00\x1b[31m\x7f", "a\tb\r\n\ud83d\u202e")
    text = render_page(
        decide_results(audits=(replace(report, extreme_tokens=(ExtremeTable("gain", "raw", (token,)),)),))
    )
    assert "<bdi>␀␛[31m␡</bdi>" in text
    assert "a⇥b␍⏎" in text
    assert "\x00" not in text


def test_a_model_without_a_centered_head_is_drawn_raw(report: AuditReport) -> None:
    sample = report.figures.geometry
    assert sample is not None
    empty = {name: () for name in vars(sample) if name.endswith("centered")}
    histograms = tuple(h for h in report.figures.histograms if h.coordinate == "raw")
    figures = replace(report.figures, histograms=histograms, geometry=replace(sample, **empty))
    capped = replace(report, figures=figures, heads=Heads(report.heads.raw, HeadNumbers()))
    assert [figure.title[0] for figure in drawings(geometry_panels(capped), "x")] == ["b", "c"]
    assert len(drawings(tail_panels(capped), "x")) == 4
    assert len(render_page(decide_results(audits=(capped, report)))) > 100_000


def test_a_single_value_still_makes_a_histogram(report: AuditReport) -> None:
    edges = log_edges([2.0, 2.0, 2.0])
    same = from_plain(DrawnHistogram, count("gain", "raw", [2.0, 2.0, math.nan], edges))
    assert sum(same.counts) == 2
    assert log_edges([math.nan, 0.0]) == []
    nothing = from_plain(DrawnHistogram, count("shift", "raw", [math.nan], []))
    flat = DrawnHistogram("violation", "raw", (1.0, 1.0), (3,))
    figures = drawings(tail_panels(replace(report, figures=Figures(histograms=(same, nothing)))), "x")
    assert [figure.title for figure in figures] == ["Gain tail"]
    assert drawings(tail_panels(replace(report, figures=Figures(histograms=(flat,)))), "x")
