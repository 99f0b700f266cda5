"""The site builds without a warning and requests nothing from other hosts."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import in_browser, started_browser
from tests.docs.pages import DOCS, ROOT

LOOKED_AT = (
    "index",
    "why",
    "ten_minutes",
    "own_loop",
    "coming_from",
    "glossary",
    "evidence",
    "decisions",
    "reference/python",
)
"""Pages with figures, wide tables or long names."""

pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'zloss[docs]')")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def built(site: Path, page: Path) -> Path:
    """The HTML file of a Markdown page."""
    name = "index" if page.stem == "README" else page.stem
    return site / page.relative_to(DOCS).with_name(f"{name}.html")


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert built(site, page).is_file(), page


def test_emphasis_is_meant(site: Path) -> None:
    """Underscores of ‖g‖_∞ … ‖g‖_∞ set the words between them in italics. Pages write *emphasis* with asterisks."""
    for page in DOCS.rglob("*.md"):
        source = page.read_text(encoding="utf-8")
        for found in re.findall(r"<em>(.*?)</em>", built(site, page).read_text(encoding="utf-8"), re.DOTALL):
            words = html.unescape(re.sub(r"<[^>]+>", "", found)).split()
            assert re.search(r"\*[\[`]*" + re.escape(words[0]), source), f"{page}: {' '.join(words)}"


def test_numbered_steps_are_items_of_a_list(site: Path) -> None:
    """A table inside a step ended the list: steps 4 to 7 of a protocol became one paragraph."""
    for page in site.rglob("*.html"):
        assert not re.search(r"^\d+\. ", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    # Addresses in <a href> are for people; those in other elements are requests.
    for page in site.rglob("*.html"):
        elements = re.findall(r"<(?!a\b)[a-z]+\b[^>]*>", page.read_text(encoding="utf-8"))
        asked = [element for element in elements if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", element)]
        assert not asked, (page.name, asked)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="needs selenium")
    with started_browser() as driver:
        yield driver


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (420, "dark")])
def test_pages_fit_the_window_and_show_every_picture(site: Path, browser: Any, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for page in (site / f"{name}.html" for name in LOOKED_AT):
        browser.get(page.as_uri())
        beyond = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        assert beyond <= 0, f"{page.name} is {beyond} px wider than a window of {width} px"
        missing = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        assert browser.execute_script(missing) == [], page.name
        shown = browser.execute_script("return document.body.getAttribute('data-md-color-scheme')")
        assert shown == {"light": "default", "dark": "slate"}[scheme], page.name
    # Search requests its index, which a browser refuses to a page opened from disk.
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in errors if "search" not in message] == []
