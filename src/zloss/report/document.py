"""A result as a document: the blocks that every result kind is described in, once, for terminal, page and Markdown.

Text is prose: `code` is in backticks, and symbols (P_Z^99.9, δ_u) are set as mathematics where the renderer can.
`Plain` text, such as the name of a model, is shown exactly as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zloss.report.numbers import MISSING, number
from zloss.results.quantities import Definition, define, symbol

Tone = Literal[
    "", "strong", "soft", "code", "raw", "centered",
    "error", "warning", "note", "pass", "fired", "harmless", "quiet", "open", "paper",
]  # fmt: skip
"""How a text looks: a weight, a coordinate, or what a verdict says."""


class Plain(str):
    """Text from outside, in which nothing is a symbol or code."""

    __slots__ = ()


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is that of a page."""

    text: str
    level: int = 2
    anchor: str = ""
    """Its id on a page."""
    link: str = ""
    """What the page's navigation calls it; empty without a link."""


@dataclass(frozen=True)
class Text:
    """A paragraph: "facts" are short and separated by dots, an "item" belongs to a list, "code" is copied as it is."""

    sentence: str
    style: Literal["", "strong", "soft", "lead", "answer", "banner", "kicker", "facts", "item", "code"] = ""
    tone: Tone = ""
    """Its color on a terminal."""


@dataclass(frozen=True)
class Terms:
    """Names with what they mean, or keys with their values."""

    items: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    kind: Literal["number", "text", "prose"] = "number"
    """Numbers and texts stay on one line; prose is broken between words."""
    quantity: Definition | None = None
    """What the column shows; a page explains it in a tooltip."""
    wide: bool = False
    """Left out on a narrow terminal."""

    @classmethod
    def of(cls, key: str, title: str = "") -> Column:
        """The column of a quantity, titled with its symbol."""
        return cls(title or symbol(key), quantity=define(key))


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    value: float | str | None = None
    """What the column is sorted by; None for a number that is missing."""
    tone: Tone = ""
    mark: str = ""
    """A word before the text, which then has the tone instead of the text."""
    note: str = ""
    """A line below the text; of a token, the text before it."""
    quantity: Definition | None = None
    token: bool = False
    """Whether the text is a token of a corpus."""


Row = tuple[Cell | str, ...]
Columns = Sequence[tuple[Column | str, str | Callable[[Any], Cell | str]]]
"""Columns, or their titles, each with the name of its number in a record or with what makes its cell."""


@dataclass(frozen=True)
class Table:
    """Lines of cells under titled columns."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    keys: int = 1
    """The first columns, which say what a line is about: every part of a table that is too wide repeats them."""
    legend: tuple[Definition, ...] = ()
    """Quantities that are explained below the table where there are no tooltips."""
    note: str = ""
    """A sentence below it."""
    name: str = ""
    """Its class on a page."""
    sortable: bool = True
    stack: bool = False
    """Whether it is `stacked` without sentences."""

    @property
    def stacked(self) -> bool:
        """Whether a narrow page shows its rows as paragraphs: sentences and many columns need the width."""
        return self.stack or any(column.kind == "prose" for column in self.columns)


@dataclass(frozen=True)
class Item:
    """A line with a verdict, and more below it."""

    name: str
    word: str
    tone: Tone
    text: str
    more: tuple[tuple[str, Tone], ...] = ()
    """(sentence, tone) of further lines where there is no room for `body`."""
    body: tuple[Block, ...] = ()
    expanded: bool = False


@dataclass(frozen=True)
class Items:
    """Lines with verdicts, one below the other."""

    items: tuple[Item, ...]


@dataclass(frozen=True)
class Card:
    """A quantity in both coordinates, under its plain name."""

    name: str
    quantity: Definition
    raw: float | None
    centered: float | None
    note: str = ""
    """Why a number is missing."""
    verdict: str = ""
    """Whether the value matters here; empty if nothing says so."""
    tone: Tone = ""


@dataclass(frozen=True)
class Figure:
    """A drawing: a Vega-Lite specification without a size."""

    name: str
    title: str
    spec: Mapping[str, Any]
    series: tuple[tuple[str, str], ...]
    """(name, color) of everything that is drawn."""
    caption: str = ""
    hint: str = ""
    """What the drawn quantity means."""
    width: int = 300
    height: int = 230
    """Size of the frame in a file, in pixels; on a page, the frame fills the width of its column."""


@dataclass(frozen=True)
class Group:
    """Blocks that a page lays out together: a section, a verdict, a row of figures, cards, tabs, or columns of small tables."""

    layout: Literal["section", "verdict", "two", "three", "cards", "tabs", "columns"]
    blocks: tuple[Block, ...]
    anchor: str = ""
    """Its id on a page."""
    link: str = ""
    """What the page's navigation calls it; empty without a link."""


Block = Heading | Text | Terms | Table | Items | Card | Figure | Group
Document = list[Block]


def cell(value: float | None, digits: int = 4) -> Cell:
    """A number as a cell."""
    return Cell(number(value, digits), value)


def table(
    records: Iterable[Any],
    columns: Columns,
    *,
    digits: int = 4,
    meanings: Mapping[str, str] | None = None,
    **options: Any,
) -> Table:
    """A line per record; `meanings` explain columns by their titles, several at once if they are separated by commas."""
    if meanings is not None:
        options["legend"] = tuple(Definition(title, title, meaning) for title, meaning in meanings.items())
    known = {title: entry for entry in options.get("legend", ()) for title in entry.symbol.split(", ")}
    titled = [
        (Column(column, quantity=known.get(column)) if isinstance(column, str) else column, shown)
        for column, shown in columns
    ]
    rows = tuple(
        tuple(cell(getattr(record, shown), digits) if isinstance(shown, str) else shown(record) for _, shown in titled)
        for record in records
    )
    return Table(tuple(column for column, _ in titled), rows, **options)


def walk(blocks: Iterable[Block]) -> Iterator[Block]:
    """Every block, those of groups and of items included."""
    for block in blocks:
        yield block
        if isinstance(block, Group):
            yield from walk(block.blocks)
        elif isinstance(block, Items):
            for item in block.items:
                yield from walk(item.body)


def terms(title: str, data: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> Terms:
    """Any part of a result as keys and values, keys of newer versions included; what is missing or empty is left out."""
    lines = flat_lines(data, skip=skip)
    return Terms(tuple((Plain(key), Plain(text)) for key, text in lines if text not in ("", MISSING)), title)


def flat_lines(data: Mapping[str, Any], *, skip: tuple[str, ...] = (), prefix: str = "") -> list[tuple[str, str]]:
    """Nested plain values as (dotted key, text); the members of `extra` are shown without its name."""
    lines: list[tuple[str, str]] = []
    for key, value in data.items():
        if key in skip:
            continue
        name = prefix if key == "extra" else f"{prefix}.{key}" if prefix else key
        if isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
            value = {str(i): item for i, item in enumerate(value)}
        lines += flat_lines(value, prefix=name) if isinstance(value, dict) else [(name, show(value))]
    return lines


def show(value: Any) -> str:
    """A value of unknown type as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value)
    return number(value, 6) if value is None or isinstance(value, (int, float)) else str(value)


# Markdown

VERDICTS = ("error", "warning", "note", "pass", "fired", "quiet", "open")
"""Tones that make a word stand out."""


def to_markdown(document: Iterable[Block]) -> str:
    """A document as Markdown: headings, sentences and tables, which is all that the Markdown pages of results have.

    Lines of a list or of code belong together, everything else is separated by an empty line.
    """
    parts: list[str] = []
    before = ""
    for block in document:
        joined = block.style if isinstance(block, Text) and block.style in ("item", "code") else ""
        text = _markdown_block(block)
        if joined and joined == before:
            parts[-1] += f"\n{text}"
        else:
            parts.append(text)
        before = joined
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
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
                map(
                    _markdown_line,
                    ([column.title for column in columns], rule, *(map(_markdown_cell, row) for row in rows)),
                )
            )
    raise TypeError(f"Markdown has no form for a {type(block).__name__}")


def _markdown_line(cells: Iterable[str]) -> str:
    # A bar would end a cell.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _markdown_cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    text = cell.text
    if cell.mark:
        text = f"**{cell.mark}** {text}".rstrip()
    elif cell.tone in VERDICTS and text:
        text = f"**{text}**"
    return f"{text} ({cell.note})" if cell.note else text
