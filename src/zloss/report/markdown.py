"""A document as Markdown: headings, sentences and tables, which is all that the Markdown pages of results have."""

from __future__ import annotations

from collections.abc import Iterable

from zloss.report.document import Block, Cell, Heading, Table, Text

VERDICTS = ("error", "warning", "note", "pass", "fired", "quiet", "open")
"""Tones that make a word stand out."""


def to_markdown(document: Iterable[Block]) -> str:
    """The page; lines of a list or of code belong together, everything else is separated by an empty line."""
    parts: list[str] = []
    before = ""
    for block in document:
        joined = block.style if isinstance(block, Text) and block.style in ("item", "code") else ""
        text = _block(block)
        if joined and joined == before:
            parts[-1] += f"\n{text}"
        else:
            parts.append(text)
        before = joined
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(sentence, "code"):
            return "\n".join(f"    {line}" for line in sentence.splitlines())
        case Text(sentence, style):
            return f"- {sentence}" if style == "item" else f"**{sentence}**" if style == "strong" else sentence
        case Table(columns, rows):
            rule = ["---:" if column.kind == "number" else "---" for column in columns]
            return "\n".join(
                map(_line, ([column.title for column in columns], rule, *(map(_cell, row) for row in rows)))
            )
    raise TypeError(f"Markdown has no form for a {type(block).__name__}")


def _line(cells: Iterable[str]) -> str:
    # A bar would end a cell.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    text = cell.text
    if cell.mark:
        text = f"**{cell.mark}** {text}".rstrip()
    elif cell.tone in VERDICTS and text:
        text = f"**{text}**"
    return f"{text} ({cell.note})" if cell.note else text
