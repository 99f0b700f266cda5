"""The page in a real browser: silent console, no request, every figure drawn and alive, tables that sort, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser import in_browser, started_browser
from tests.decide.made_up_drift import made_up_drift
from tests.decide.made_up_recommendation import made_up_recommendation
from zloss.decide.answer import DecidedResults, decide_results
from zloss.report.figures import CENTERED, RAW
from zloss.report.files import notebook_html, render_page
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.io import write_text
from zloss.results.loss_audit import LossAudit
from zloss.results.reproduction import ReproductionRecord

DOCUMENTED = Path(__file__).parents[2] / "docs/results"
COMMITTED = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)

pytestmark = [pytest.mark.browser, in_browser]
pytest.importorskip("selenium", reason="needs selenium")

from selenium.webdriver import ActionChains  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, report: AuditReport) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_text(path, render_page(DecidedResults(audits=(report,))))
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
    write_text(path, render_page(decide_results((report, other), (loss_audit,), (comparison,))))
    return path


def open_page(browser: Any, path: Path) -> None:
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    WebDriverWait(browser, 120).until(
        lambda driver: driver.execute_script("return document.documentElement.dataset.drawn")
    )


def requested(browser: Any) -> list[str]:
    """URLs the browser requested, except `data:` ones."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


def test_the_policy_stops_a_request_and_the_log_would_show_it(browser: Any, single: Path, tmp_path: Path) -> None:
    # Both oracles can fail: an image from elsewhere shows in the console, and without the policy as a request.
    image = '<img src="file:///nowhere/picture.png">'
    guarded = tmp_path / "guarded.html"
    guarded.write_text(single.read_text(encoding="utf-8").replace("<main>", f"<main>{image}"), encoding="utf-8")
    open_page(browser, guarded)
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]
    bare = tmp_path / "bare.html"
    bare.write_text(f"<!doctype html><title>x</title>{image}", encoding="utf-8")
    browser.get_log("performance")
    browser.get(bare.as_uri())
    assert len(requested(browser)) == 2


HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"


def test_hostile_text_stays_text_in_tables_figures_and_tooltips(
    browser: Any, tmp_path: Path, report: AuditReport, loss_audit: LossAudit
) -> None:
    curves = tuple(replace(curve, name=f"{HOSTILE}{i}") for i, curve in enumerate(COMMITTED.curves))
    audits = [replace(report, model=replace(report.model, name=f"{HOSTILE}{i}")) for i in range(2)]
    path = tmp_path / "report.html"
    lost = replace(loss_audit, provenance={"loss": HOSTILE})
    write_text(path, render_page(decide_results(audits, (lost,), (replace(COMMITTED, curves=curves),))))
    open_page(browser, path)
    for name in ("cross_entropy", "p_z_999"):
        figure = browser.find_elements("css selector", f'figure[data-name="{name}"]')[-1]
        hover(browser, figure, ".mark-symbol path, .mark-line path")
    assert "window.ran" in tooltip(browser)
    assert browser.execute_script("return window.ran") is None
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert browser.get_log("browser") == []
    assert requested(browser) == [path.as_uri()]


def test_a_notebook_s_frame_draws_its_pictures_without_scripts(
    browser: Any, tmp_path: Path, report: AuditReport
) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>x</title>{notebook_html(report)}", encoding="utf-8")
    browser.get_log("browser")
    browser.get(path.as_uri())
    browser.switch_to.frame(browser.find_element("css selector", "iframe"))
    pictures = browser.find_elements("css selector", "figure img")
    sizes = [(picture.size["width"], picture.get_property("naturalWidth")) for picture in pictures]
    browser.switch_to.default_content()
    assert len(sizes) == 9
    assert all(shown > 100 and natural > 100 for shown, natural in sizes)
    assert browser.get_log("browser") == []


DRAWN = """
return [...document.querySelectorAll("figure[data-name]")].map(figure => {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll(".mark-symbol path, .mark-rect path, .mark-line path")].filter(
    mark => !mark.closest(".role-axis, .role-legend"));
  const boxes = marks.map(mark => mark.getBoundingClientRect());
  const span = (low, high) => Math.max(...boxes.map(high)) - Math.min(...boxes.map(low));
  return {name: figure.dataset.name, marks: marks.length, wide: box.width > 100 && box.height > 40,
          ticks: svg.querySelectorAll(".role-axis-label text").length,
          ink: span(b => b.left, b => b.right) + span(b => b.top, b => b.bottom) > 20};
});
"""


def test_it_opens_silently_with_every_figure_and_every_token(browser: Any, joined: Path, report: AuditReport) -> None:
    open_page(browser, joined)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert browser.get_log("browser") == []
    assert requested(browser) == [joined.as_uri()]
    charts = browser.execute_script(DRAWN)
    tails = [f"tail-{quantity}" for quantity in ("violation", "gain", "shift", "delta_u")]
    per_audit = ["plane", "rank16", "rays", *tails, "sigma", "energy"]
    compared = ["mu_abs_99", "p_z_999", "a_p_99", "delta_u_99"]
    assert [chart["name"] for chart in charts] == [*compared, *per_audit, *per_audit]
    for chart in charts:
        assert chart["marks"] > 0, chart
        assert chart["wide"], chart
        assert chart["ticks"] >= 2, chart
        assert chart["ink"], chart
    count = "return document.querySelector('figure[data-name=plane]').querySelectorAll('.mark-symbol path').length"
    assert report.figures.geometry is not None
    # The head of the arrow is the last.
    assert browser.execute_script(count) == 2 * len(report.figures.geometry) + 1


CLEAR = """
return [...document.querySelectorAll("figure[data-name]")].flatMap(figure => {
  const name = figure.dataset.name, outer = figure.getBoundingClientRect();
  const texts = [...figure.querySelectorAll(".role-axis-label text, .role-axis-title text")]
    .filter(t => t.textContent && Number(t.getAttribute("opacity") ?? 1) > 0)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = b => b.left < outer.left - 1 || b.right > outer.right + 1 || b.bottom > outer.bottom + 1;
  const over = texts.filter(([, box]) => outside(box));
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const pairs = texts.flatMap((a, i) => texts.slice(i + 1).filter(b => meets(a[1], b[1])).map(b => [name, a[0], b[0]]));
  return [...over.map(([text]) => [name, text, "outside"]), ...pairs];
});
"""


@pytest.mark.parametrize("scale", [1.0, 3e-3, 2e-6, 5e5])
def test_labels_of_figures_keep_clear_of_one_another(
    browser: Any, tmp_path: Path, report: AuditReport, other: AuditReport, scale: float
) -> None:
    """Small sources have long tick labels, which ran into the title of their axis."""
    sample = report.figures.geometry
    assert sample is not None
    columns = {
        name: tuple(value * (1 if name.startswith(("a2", "rank16")) else scale) for value in values[:50])
        for name, values in vars(sample).items()
        if isinstance(values, tuple)
    }
    small = replace(report, figures=replace(report.figures, geometry=replace(sample, **columns)))
    path = tmp_path / "report.html"
    write_text(path, render_page(decide_results(audits=(small, other), comparisons=(COMMITTED,))))
    open_page(browser, path)
    assert browser.execute_script(CLEAR) == []


def scroll_to(browser: Any, element: Any) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)


def hover(browser: Any, figure: Any, selector: str) -> None:
    """Point at the last mark of a figure that can be pointed at."""
    scroll_to(browser, figure)
    last = (
        "return [...arguments[0].querySelectorAll(arguments[1])].filter(m => m.getBoundingClientRect().width > 0).pop()"
    )
    ActionChains(browser).move_to_element(browser.execute_script(last, figure, selector)).perform()


def tooltip(browser: Any) -> str:
    return str(browser.find_element("id", "vg-tooltip-element").text)


def test_a_click_on_its_name_hides_a_series_in_all_figures_of_the_row(browser: Any, single: Path) -> None:
    open_page(browser, single)
    plots = browser.find_element("css selector", ".plots")
    browser.execute_script("arguments[0].scrollIntoView({block: 'start', behavior: 'instant'})", plots)
    counts = (
        "return [...arguments[0].querySelectorAll('figure')].map(f => f.querySelectorAll('.mark-symbol path').length)"
    )
    before = browser.execute_script(counts, plots)
    raw, centered = plots.find_elements("css selector", "button.chip")
    browser.execute_script("scrollBy(0, -120)")
    raw.click()
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(counts, plots) != before)
    after = browser.execute_script(counts, plots)
    assert [half * 2 for half in (before[1] // 2, before[2] // 2)] == before[1:]
    assert after[1:] == [before[1] // 2, before[2] // 2]
    assert (raw.get_attribute("aria-pressed"), centered.get_attribute("aria-pressed")) == ("false", "true")
    raw.click()
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(counts, plots) == before)


ZOOM = """
const figure = arguments[0], svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
const target = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
target.dispatchEvent(new WheelEvent("wheel", {deltaY: -300, shiftKey: arguments[1], bubbles: true, cancelable: true,
  clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
"""
LABELS = "return [...arguments[0].querySelectorAll('.role-axis-label text')].map(t => t.textContent).join(' ')"


def test_shift_and_the_wheel_zoom_and_the_wheel_alone_scrolls(browser: Any, single: Path) -> None:
    open_page(browser, single)
    figure = browser.find_element("css selector", "figure[data-name=plane]")
    scroll_to(browser, figure)
    before = browser.execute_script(LABELS, figure)
    browser.execute_script(ZOOM, figure, False)
    assert browser.execute_script(LABELS, figure) == before
    browser.execute_script(ZOOM, figure, True)
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(LABELS, figure) != before)


def test_tables_sort_both_ways_by_number_and_by_text(browser: Any, single: Path) -> None:
    open_page(browser, single)
    table = browser.find_element("css selector", "table.numbers")
    headers = table.find_elements("css selector", "thead th")
    scroll_to(browser, table)

    def column() -> list[float]:
        cells = "return [...arguments[0].tBodies[0].rows].map(r => r.children[1].dataset.value)"
        return [float(cell) for cell in browser.execute_script(cells, table) if cell]

    before = column()
    headers[1].click()
    assert column() == sorted(before, reverse=True) != before
    assert headers[1].get_attribute("aria-sort") == "descending"
    headers[1].click()
    assert column() == sorted(before)
    headers[1].send_keys("\n")
    assert column() == sorted(before, reverse=True)
    headers[0].click()
    assert table.find_element("css selector", "tbody td").get_attribute("data-value") == "a_p_99"
    assert headers[1].get_attribute("aria-sort") is None


def test_extreme_tokens_read_as_text_and_change_by_tab(browser: Any, single: Path, report: AuditReport) -> None:
    open_page(browser, single)
    tabs = browser.find_elements("css selector", "[role=tab]")
    assert len(tabs) == len(report.extreme_tokens) == 4
    scroll_to(browser, tabs[0])
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
    color = browser.execute_script(script, selector, css_property)
    return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / (3 * 255)


def test_light_and_dark_both_read_well(browser: Any, single: Path) -> None:
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        open_page(browser, single)
        browser.execute_script("localStorage.clear(); delete document.documentElement.dataset.theme")
        paper, ink = luminance(browser, "backgroundColor"), luminance(browser, "color")
        assert (paper > 0.9 and ink < 0.2) if scheme == "light" else (paper < 0.15 and ink > 0.8)
        raw = luminance(browser, "fill", "figure[data-name=plane] .mark-symbol path")
        label = luminance(browser, "fill", "figure[data-name=plane] .role-axis-label text")
        assert abs(raw - paper) > 0.2
        assert abs(label - paper) > 0.3
        browser.find_element("id", "theme").click()
        assert (luminance(browser, "backgroundColor") < 0.5) is (scheme == "light")
        # The choice is remembered when the page is opened again.
        open_page(browser, single)
        assert (luminance(browser, "backgroundColor") < 0.5) is (scheme == "light")
        browser.execute_script("localStorage.clear()")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_it_prints_with_its_figures_and_without_its_controls(browser: Any, single: Path) -> None:
    open_page(browser, single)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    bar = browser.find_element("css selector", ".bar").is_displayed()
    figures = [one.is_displayed() for one in browser.find_elements("css selector", "figure svg")]
    pages = browser.print_page()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert not bar
    assert figures == [True] * 9
    assert len(pages) > 50_000


@pytest.mark.parametrize(("figure", "marks"), [("rank16", ".mark-symbol path"), ("tail-gain", ".mark-rect path")])
def test_a_mark_tells_its_values(browser: Any, single: Path, figure: str, marks: str) -> None:
    open_page(browser, single)
    hover(browser, browser.find_element("css selector", f"figure[data-name={figure}]"), marks)
    heading, *lines = tooltip(browser).splitlines()
    assert heading in (RAW, CENTERED)
    starts = {"rank16": ("exact a²", "rank-16 part of a²"), "tail-gain": ("gain", "to", "tokens")}[figure]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    shown = browser.find_element("id", "vg-tooltip-element")
    assert shown.is_displayed()
    # Its style is the page's own: the library's sheet would be against the policy.
    assert shown.value_of_css_property("position") == "fixed"


def wide_results(kind: str) -> dict[str, Any]:
    """Results that ran over the edge: ten names of methods above the curves, lines to paste, checksums of texts."""
    many = tuple(replace(curve, name=f"{curve.name}-{i}") for i in range(6) for curve in COMMITTED.curves)
    records = {
        "comparisons": replace(COMMITTED, curves=many),
        "recommendations": made_up_recommendation(),
        "drifts": made_up_drift((2.0, 2.0, 9.0, 12.0)),
        "reproductions": read_record(DOCUMENTED / "tab_pretrained.json", ReproductionRecord),
    }
    return {kind: (records[kind],)}


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *(("joined", width) for width in (420, 800, 1280, 1900)),
        *((kind, 420) for kind in ("comparisons", "recommendations", "drifts", "reproductions")),
        ("comparisons", 1280),
    ],
)
def test_nothing_runs_over_the_edge(browser: Any, joined: Path, tmp_path: Path, kind: str, width: int) -> None:
    path = joined if kind == "joined" else tmp_path / "report.html"
    if kind != "joined":
        write_text(path, render_page(decide_results(**wide_results(kind))))
    # A browser window has a smallest width; the emulated screen has not.
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    open_page(browser, path)
    overflow = browser.execute_script(
        "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    parts = browser.execute_script(
        "return [...document.querySelectorAll('.quality td.prose')].map(cell => cell.getBoundingClientRect().width)"
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert overflow == 0
    assert min(parts, default=180) >= 180, "the parts of a verdict are wide enough to read"
