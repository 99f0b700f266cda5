"""The Markdown pages of the repository: their headings, links and code blocks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
ATTRIBUTE = re.compile(r'(?:src|href|srcset)="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page; the language is the first word behind the fence."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page, text[: found.start()].count("\n") + 1, found[2].strip().partition(" ")[0], textwrap.dedent(found[3])
        )
        for found in FENCE.finditer(text)
    ]


def prose_of(page: Path) -> str:
    """The page without code: neither fenced blocks nor `code`, where brackets are not links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def links_of(page: Path) -> Iterator[str]:
    """Targets of Markdown links and images, and of HTML attributes, that lead to files of the repository."""
    text = prose_of(page)
    for target in [*LINK.findall(text), *ATTRIBUTE.findall(text)]:
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors_of(page: Path) -> set[str]:
    """The fragments that lead to a heading or an explicit id of a page, as GitHub and the site form them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slug(heading) for heading in headings} | set(re.findall(r'(?:id|name)="([^"]+)"', text))


def slug(heading: str) -> str:
    """Lower case, letters, digits, hyphens and underscores; spaces become hyphens.

    >>> slug("The paper's training tables, on `two` cores")
    'the-papers-training-tables-on-two-cores'
    """
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\- ]", "", words))
