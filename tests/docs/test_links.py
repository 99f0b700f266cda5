"""Every link between pages leads to a file that exists, and every fragment to a heading there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, links_of


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in links_of(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        # The reference pages are written by mkdocstrings: only the site knows their anchors, and its build checks them.
        unknown = fragment and target.suffix == ".md" and fragment not in anchors_of(target) and "." not in fragment
        if not target.exists() or unknown:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_of_the_site_links_only_inside_it(page: Path) -> None:
    for link in links_of(page):
        assert (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS), link


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "CHANGELOG"], ids=lambda page: page.name)
def test_every_file_of_the_repository_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"\b(?:tests|tools|benchmarks)/[\w/.-]+\.(?:py|sh|json|txt)\b", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_a_wrong_file_and_a_wrong_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n[a](#title) [b](#other) [c](gone.md) `[d](x.md)` ![e](e.svg)\n")
    assert broken_links(page) == ["#other", "gone.md", "e.svg"]
