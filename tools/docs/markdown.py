"""Tables and cells of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WRITTEN_BY = (
    "<!-- Written by `python -m tools.docs` (`make pages`). Edit the generator in tools/docs, not this file. -->"
)


def cell(text: str) -> str:
    """One line, with the separator of cells escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; a title that ends in ":" is a column of numbers."""
    rules = ["--:" if title.endswith(":") else "---" for title in titles]
    rows = [[title.removesuffix(":") for title in titles], rules, *([cell(text) for text in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def sentence(text: str) -> str:
    """`text` with a capital letter and a full stop; symbols and settings at the start keep their case."""
    word = text.partition(" ")[0].strip(",:").replace("-", "")
    in_words = word[:1].islower() and word.isalpha() and word.isascii() and len(word) > 1
    first = text[:1].upper() if in_words else text[:1]
    return f"{first}{text[1:]}" if text.endswith((".", "?")) else f"{first}{text[1:]}."
