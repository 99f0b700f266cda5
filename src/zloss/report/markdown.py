"""A document as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zloss.report.document import Block, Card, Cell, Figure, Group, Heading, Item, Items, Table, Terms, Text
from zloss.report.numbers import number

VERDICTS = ("error", "warning", "note", "pass", "fired", "quiet", "open")
"""Tones that make a word stand out."""


def to_markdown(document: Iterable[Block]) -> str:
    """The page; lines of a list or of code belong together, everything else is parted by an empty line."""
    parts: list[str] = []
    before = ""
    for block in document:
        joined = block.style if isinstance(block, Text) and block.style in ("item", "code") else ""
        text = _block(block)
        if joined and joined == before:
            parts[-1] += f"\n{text}"
        elif text:
            parts.append(text)
        before = joined
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(sentence, "code"):
            return "\n".join(f"    {line}" for line in sentence.splitlines())
        case Text(sentence, style, tone):
            strong = style == "strong" or tone == "strong"
            return f"- {sentence}" if style == "item" else f"**{sentence}**" if strong else sentence
        case Terms(items, title):
            return "\n".join([*([f"**{title}**\n"] if title else []), *(f"- {name}: {text}" for name, text in items)])
        case Table():
            return _table(block)
        case Items(items):
            return "\n".join(map(_item, items))
        case Card(name, quantity, raw, centered):
            return f"- {name} ({quantity.symbol}): {number(raw)} raw, {number(centered)} centered"
        case Figure(name, title):
            return f"![{title}]({name}.svg)"
        case Group(_, blocks):
            return to_markdown(blocks).rstrip("\n")


def _item(item: Item) -> str:
    return "\n".join([f"- {item.name}: **{item.word}**; {item.text}", *(f"  - {line}" for line, _ in item.more)])


def _table(table: Table) -> str:
    rule = ["---:" if column.kind == "number" else "---" for column in table.columns]
    titles = [column.title.replace("\n", " ") for column in table.columns]
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    lines = [_line(titles), _line(rule), *map(_line, rows)]
    head, tail = ([f"**{table.title}**", ""] if table.title else []), (["", table.note] if table.note else [])
    return "\n".join([*head, *lines, *tail])


def _line(cells: Sequence[str]) -> str:
    # A bar would end a cell.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    text = f"{cell.note}{cell.text}" if cell.token else cell.text
    if cell.mark:
        text = f"**{cell.mark}** {text}".rstrip()
    elif cell.tone in VERDICTS and text:
        text = f"**{text}**"
    return f"{text} ({cell.note})" if cell.note and not cell.token else text
