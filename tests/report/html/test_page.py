"""The page in a real browser: silent console, no request, every figure drawn, tables that sort, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import in_browser, started_browser
from zloss.decide.decided_results import DecidedResults, decide_results
from zloss.report.html.page import write_page
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit

COMMITTED = Path(__file__).parents[3] / "docs/results/matched_smollm2.json"

pytestmark = [pytest.mark.browser, in_browser]
pytest.importorskip("selenium", reason="needs selenium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, report: AuditReport) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, DecidedResults(audits=(report,)))
    return path


@pytest.fixture(scope="module")
def joined(
    tmp_path_factory: pytest.TempPathFactory,
    report: AuditReport,
    other: AuditReport,
    loss_audit: LossAudit,
    comparison: Comparison,
) -> Path:
    path = tmp_path_factory.mktemp("page") / "joined.html"
    write_page(path, decide_results((report, other), (loss_audit,), (comparison,)))
    return path


def open_page(browser: Any, path: Path) -> None:
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())


def requested(browser: Any) -> list[str]:
    """URLs the browser asked for, `data:` ones apart."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


@pytest.mark.parametrize("which", ["single", "joined"])
def test_it_opens_without_a_console_message_or_a_request(
    browser: Any, which: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    open_page(browser, path)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.get_log("browser") == []
    assert requested(browser) == [path.as_uri()]


def test_the_policy_stops_a_request_and_the_log_would_show_it(browser: Any, single: Path, tmp_path: Path) -> None:
    # The two oracles above can fail: an image from elsewhere shows in the console, and without the policy as a request.
    image = '<img src="file:///nowhere/picture.png">'
    guarded = tmp_path / "guarded.html"
    guarded.write_text(single.read_text(encoding="utf-8").replace("<main>", f"<main>{image}"), encoding="utf-8")
    open_page(browser, guarded)
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
    bare = tmp_path / "bare.html"
    bare.write_text(f"<!doctype html><title>x</title>{image}", encoding="utf-8")
    open_page(browser, bare)
    assert len(requested(browser)) == 2


DRAWN = """
return [...document.querySelectorAll("svg.chart")].map(svg => {
  const marks = [...svg.querySelectorAll("path.dots, path.steps, path.line")];
  const frame = svg.querySelector("rect.frame").getBoundingClientRect();
  const boxes = marks.map(mark => mark.getBBox());
  const span = (low, high) => Math.max(...boxes.map(high)) - Math.min(...boxes.map(low));
  const visible = marks.filter(mark => getComputedStyle(mark).stroke !== "none");
  const ink = span(b => b.x, b => b.x + b.width) + span(b => b.y, b => b.y + b.height) > 20;
  return {id: svg.id, marks: marks.length, visible: visible.length, wide: frame.width > 100 && frame.height > 40,
          ticks: svg.querySelectorAll("text.tick").length, ink};
});
"""


def test_every_figure_is_drawn(browser: Any, joined: Path) -> None:
    open_page(browser, joined)
    charts = browser.execute_script(DRAWN)
    names = [chart["id"] for chart in charts]
    per_audit = [
        "plane",
        "rank16",
        "rays",
        "tail-violation",
        "tail-gain",
        "tail-shift",
        "tail-delta_u",
        "sigma",
        "energy",
    ]
    assert names == [
        *(f"compare-{key}" for key in ("mu_abs_99", "p_z_999", "a_p_99", "delta_u_99")),
        *(f"a{i}-{name}" for i in (0, 1) for name in per_audit),
    ]
    for chart in charts:
        assert chart["marks"] == chart["visible"] > 0, chart
        assert chart["wide"], chart
        assert chart["ticks"] >= 2, chart
        assert chart["ink"], chart


CLEAR = """
return [...document.querySelectorAll("svg.chart")].flatMap(svg => {
  const outer = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text.tick, text.axis")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = b => b.left < outer.left - 1 || b.right > outer.right + 1 || b.bottom > outer.bottom + 1;
  const over = texts.filter(([, box]) => outside(box));
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const pairs = texts.flatMap((a, i) => texts.slice(i + 1).filter(b => meets(a[1], b[1])).map(b => [svg.id, a[0], b[0]]));
  return [...over.map(([text]) => [svg.id, text, "outside"]), ...pairs];
});
"""


@pytest.mark.parametrize("scale", [1.0, 3e-3, 2e-6, 5e5])
def test_labels_of_figures_keep_clear_of_one_another(
    browser: Any, tmp_path: Path, report: AuditReport, other: AuditReport, scale: float
) -> None:
    """Small sources have long tick labels (2.5×10⁻⁵), which ran into the title of their axis."""
    sample = report.figures.geometry
    assert sample is not None
    columns = {
        name: tuple(scale * value for value in getattr(sample, name))
        for name in vars(sample)
        if name.startswith(("delta", "x_", "y_"))
    }
    small = replace(report, figures=replace(report.figures, geometry=replace(sample, **columns)))
    path = tmp_path / "report.html"
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    write_page(path, decide_results(audits=(small, other), comparisons=(Comparison.from_dict(committed),)))
    open_page(browser, path)
    assert browser.execute_script(CLEAR) == []


def column(browser: Any, table: Any, index: int) -> list[float]:
    cells = browser.execute_script(
        "return [...arguments[0].tBodies[0].rows].map(r => r.children[arguments[1]].dataset.value)", table, index
    )
    return [float(cell) for cell in cells if cell]


def test_tables_sort_both_ways_by_number_and_by_text(browser: Any, single: Path, report: AuditReport) -> None:
    open_page(browser, single)
    table = browser.find_element("css selector", "table.numbers")
    headers = table.find_elements("css selector", "thead th")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", table)
    before = column(browser, table, 1)
    headers[1].click()
    assert column(browser, table, 1) == sorted(before, reverse=True) != before
    assert headers[1].get_attribute("aria-sort") == "descending"
    headers[1].click()
    assert column(browser, table, 1) == sorted(before)
    headers[1].send_keys("\n")
    assert column(browser, table, 1) == sorted(before, reverse=True)
    headers[0].click()
    first = table.find_element("css selector", "tbody td").get_attribute("data-value")
    assert first == "a_p_99"
    assert headers[1].get_attribute("aria-sort") is None


def test_extreme_tokens_read_as_text_and_change_by_tab(browser: Any, single: Path, report: AuditReport) -> None:
    open_page(browser, single)
    tabs = browser.find_elements("css selector", "[role=tab]")
    assert len(tabs) == len(report.extreme_tokens) == 4
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", tabs[0])
    for number, table in enumerate(report.extreme_tokens):
        tabs[number].click()
        shown = [panel for panel in browser.find_elements("css selector", "[role=tabpanel]") if panel.is_displayed()]
        assert len(shown) == 1
        marks = [mark.text for mark in shown[0].find_elements("css selector", "mark")]
        assert marks == [token.target.replace("\n", "⏎") for token in table.tokens]
    # Tokens with markup in them stay text: the tiny vocabulary holds some.
    assert any("<b>" in token.context for table in report.extreme_tokens for token in table.tokens)
    assert not browser.find_elements("css selector", ".context b")


def luminance(browser: Any, css_property: str, selector: str = "body") -> float:
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    colour = browser.execute_script(script, selector, css_property)
    return sum(float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / (3 * 255)


def test_light_and_dark_both_read_well(browser: Any, single: Path) -> None:
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        open_page(browser, single)
        browser.execute_script("localStorage.clear(); delete document.documentElement.dataset.theme")
        paper, ink = luminance(browser, "backgroundColor"), luminance(browser, "color")
        assert (paper > 0.9 and ink < 0.2) if scheme == "light" else (paper < 0.15 and ink > 0.8)
        raw = luminance(browser, "stroke", ".chart .dots.raw")
        assert abs(raw - paper) > 0.2
        browser.find_element("id", "theme").click()
        assert (luminance(browser, "backgroundColor") < 0.5) is (scheme == "light")
        # The choice is remembered when the page is opened again.
        open_page(browser, single)
        assert (luminance(browser, "backgroundColor") < 0.5) is (scheme == "light")
        browser.execute_script("localStorage.clear()")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [420, 800, 1280, 1900])
def test_nothing_runs_over_the_edge_at_any_width(browser: Any, joined: Path, width: int) -> None:
    # A browser window has a smallest width; the emulated screen has not.
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    open_page(browser, joined)
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert overflow == 0


@pytest.mark.parametrize("width", [420, 1280])
def test_a_comparison_of_many_methods_stays_inside_the_page(browser: Any, tmp_path: Path, width: int) -> None:
    """The names of ten methods above the curves ran over the edge."""
    committed = Comparison.from_dict(json.loads(COMMITTED.read_text(encoding="utf-8")))
    many = [replace(curve, name=f"{curve.name}-{i}") for i in range(6) for curve in committed.curves]
    path = tmp_path / "report.html"
    write_page(path, decide_results(comparisons=(replace(committed, curves=tuple(many)),)))
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    open_page(browser, path)
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    parts = browser.execute_script(
        "return [...document.querySelectorAll('.quality td[data-part]')].map(cell => cell.getBoundingClientRect().width)"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert overflow == 0
    assert min(parts) >= 180, "the parts of a verdict are wide enough to read"


def test_a_dot_tells_its_values(browser: Any, single: Path) -> None:
    from selenium.webdriver import ActionChains

    open_page(browser, single)
    chart = browser.find_element("id", "a0-rays")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    place = browser.execute_script(
        "const s = arguments[0], m = s.querySelector('.dots.raw').getAttribute('d').match(/M([\\d.]+),([\\d.]+)/);"
        "const b = s.getBoundingClientRect(), k = b.width / s.viewBox.baseVal.width;"
        "return [Number(m[1]) * k - b.width / 2, Number(m[2]) * k - b.height / 2]",
        chart,
    )
    ActionChains(browser).move_to_element_with_offset(chart, round(place[0]), round(place[1])).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert tip.text.split()[0] in ("raw", "centered")
