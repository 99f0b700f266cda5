"""A document as one self-contained page that opens offline.

Its content policy names the checksums of the page's own style sheet and scripts, so a browser sends no request and runs no
other script and no attribute with code or style, whatever text reaches the page. Figures are data until the page's script
draws them. Bar widths and series colors, which would otherwise be style attributes, are classes of the style sheet.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Literal

from zloss.errors import MissingDependencyError
from zloss.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Figure,
    Group,
    Heading,
    Item,
    Items,
    Plain,
    Table,
    Terms,
    Text,
    walk,
)
from zloss.report.figures import COLORS, ON_PAGE, SYMBOL, TONES, drawn, figure_scripts, interactive, plain_symbols
from zloss.report.glossary import entries
from zloss.report.numbers import number
from zloss.results.folder import PAGE_MARK

MAX_BYTES = 3_000_000
Figures = Literal["script", "static", "none"]
"""Drawn by the page's script, as pictures, or left out."""
COORDINATES = (
    "Raw and centered are two coordinates of one model, not two models: softmax, CE and PPL are the same in both. The decision "
    "map follows the paper; thresholds and consequences are zloss's own, and every limit can be set."
)
NO_SCRIPT = "The figures of this page are drawn by its script; `zloss report --figures` writes them as files."


def to_page(document: Sequence[Block], title: str, *, static: bool = False) -> str:
    """The page; a `static` one has no script, and its figures are pictures.

    Where the package that draws figures is not installed, the page says so and is complete except for them.
    """
    figures: Figures = "static" if static else "script"
    scripts, hint = [] if static else [_asset("page.js")], ""
    if any(isinstance(block, Figure) for block in walk(document)):
        try:
            needed = figure_scripts(static=static)
            scripts, hint = [*needed, *scripts], "" if static else f"<noscript>{_banner(NO_SCRIPT)}</noscript>"
        except MissingDependencyError as error:
            figures, hint = "none", _banner(str(error))
    style = _asset("page.css") + _generated_rules()
    allowed = " ".join(f"'{_checksum(script)}'" for script in scripts) or "'none'"
    # No requests, no base address, no forms.
    policy = (
        f"default-src 'none'; style-src '{_checksum(style)}'; script-src {allowed}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(
        f'<a href="#{escape(block.anchor)}">{escape(block.link)}</a>'
        for block in walk(document)
        if isinstance(block, (Heading, Group)) and block.link
    )
    bar = (
        f'<header class="bar"><span class="brand">zloss</span><nav>{links}<a href="#glossary">Glossary</a></nav>'
        '<button id="theme" type="button" aria-label="Switch between light and dark" title="Light or dark">◐</button></header>'
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f'<title>{escape(title)}{PAGE_MARK}\n<link rel="icon" href="data:,">',
            f"<style>{style}</style>",
            *(f"<script>{one}</script>" for one in scripts),
            f"</head>\n<body>\n{'' if static else bar}\n<main>{hint}",
            to_html(document, figures),
            f"{_footer()}\n</main>\n</body>\n</html>\n",
        ]
    )


def _banner(sentence: str) -> str:
    return f'<p class="banner">{prose(sentence)}</p>'


def _checksum(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (files("zloss.report") / "assets" / name).read_text(encoding="utf-8")


def _generated_rules() -> str:
    """The generated rules of the style sheet: a class for each series color."""
    return "".join(
        f".chip.{_color_class(color)}::before {{ background: {_on_page(color)}; }}\n"
        for color in dict.fromkeys((*TONES.values(), *COLORS))
    )


def _color_class(color: str) -> str:
    return f"c-{color.removeprefix('#')}"


def _on_page(color: str) -> str:
    return f"var({ON_PAGE[color]})" if color in ON_PAGE else color


def _footer() -> str:
    terms = "".join(f"<dt>{_entry_name(name)}</dt><dd>{prose(meaning)}</dd>\n" for name, meaning in entries())
    more = prose("`zloss glossary WORD` explains every other symbol and key.")
    return (
        "<footer><details><summary>Glossary: what the letters and the numbers mean</summary>"
        f'<dl id="glossary">{terms}</dl><p>{more}</p></details><p>{prose(COORDINATES)}</p></footer>'
    )


def _entry_name(name: str) -> str:
    """A symbol with its key after it; the key is what files have and is shown as it is."""
    written, opened, key = name.partition(" (")
    return f"{prose(written)} <code>{escape(key.removesuffix(')'))}</code>" if opened else prose(name)


def prose(text: str) -> str:
    """Escaped text, with `code` and symbols set as mathematics unless it is plain.

    >>> prose("A_p^99 < `zloss audit`")
    '<var>A</var><span class="ss"><sup>99</sup><sub>p</sub></span> &lt; <code>zloss audit</code>'
    """
    if isinstance(text, Plain):
        return escape(text)
    parts = text.split("`")
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else _symbols(part) for i, part in enumerate(parts))


def _symbols(text: str) -> str:
    out, last = [], 0
    for match in SYMBOL.finditer(text):
        if match[2] is None and match[3] is None:
            continue
        sub, sup = (
            f"<{tag}>{script}</{tag}>" if script else "" for tag, script in (("sub", match[2]), ("sup", match[3]))
        )
        scripts = f'<span class="ss">{sup}{sub}</span>' if sub and sup else sub + sup
        out += [escape(text[last : match.start()]), f"<var>{match[1]}</var>{scripts}"]
        last = match.end()
    return "".join([*out, escape(text[last:])])


def to_html(document: Iterable[Block], figures: Figures) -> str:
    """The blocks one after the other; sentences of a list belong together."""
    parts = []
    for listed, run in groupby(document, lambda block: isinstance(block, Text) and block.style == "item"):
        shown = "\n".join(_block(block, figures) for block in run)
        parts.append(f"<ul>{shown}</ul>" if listed else shown)
    return "\n".join(parts)


def _block(block: Block, figures: Figures) -> str:
    match block:
        case Heading(text, level, anchor):
            return f"<h{level}{_attribute('id', anchor)}>{prose(text)}</h{level}>"
        case Text():
            return _text(block)
        case Terms(items, ""):
            return f"<dl>{''.join(f'<dt>{prose(name)}</dt><dd>{prose(text)}</dd>' for name, text in items)}</dl>"
        case Terms(items, title):
            rows = "".join(
                f'<tr><th scope="row">{prose(name)}</th><td>{prose(text)}</td></tr>\n' for name, text in items
            )
            return f'<div class="pairs"><h4>{prose(title)}</h4><table><tbody>{rows}</tbody></table></div>'
        case Table():
            return _table(block)
        case Items(items):
            return f'<div class="decisions">{"".join(_item(item, figures) for item in items)}</div>'
        case Card():
            return _card(block)
        case Figure():
            return _figure(block, figures)
        case Group():
            return _group(block, figures)


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def _text(text: Text) -> str:
    shown = prose(text.sentence)
    match text.style:
        case "item":
            return f"<li>{shown}</li>"
        case "code":
            return f"<pre>{escape(text.sentence)}</pre>"
        case "facts":
            return (
                f'<p class="facts">{"".join(f"<span>{prose(part)}</span>" for part in text.sentence.split(" · "))}</p>'
            )
        case style:
            strong = style in ("strong", "answer")
            return f"<p{_attribute('class', style)}>{f'<b>{shown}</b>' if strong else shown}</p>"


def _table(table: Table) -> str:
    """A table under its title; a sortable one is sorted by its numbers, not by their text."""
    marks = {"sortable": table.sortable, "stacked": table.stacked, table.name: bool(table.name)}
    classes = " ".join(name for name, marked in marks.items() if marked)
    titles = "".join(
        f"<th{_attribute('class', 'n' if column.kind == 'number' else '')}{_hint(column)}>"
        f"{prose(column.title if isinstance(column.title, Plain) else column.title.replace(chr(10), ' '))}</th>"
        for column in table.columns
    )
    head = f"<thead><tr>{titles}</tr></thead>" if any(column.title for column in table.columns) else ""
    rows = "".join(f"<tr>{_cells(table, row)}</tr>\n" for row in table.rows)
    shown = f"<table{_attribute('class', classes)}>{head}<tbody>{rows}</tbody></table>" if rows else ""
    title = f"<h4>{prose(table.title)}</h4>" if table.title else ""
    note = _legend_of(table) + (f'<p class="soft">{prose(table.note)}</p>' if table.note else "")
    if table.name == "small":
        return f'<div class="pairs">{title}{shown}{note}</div>'
    return f'{title}<div class="scroll">{shown}</div>{note}'


def _legend_of(table: Table) -> str:
    """What the columns mean, below a table without a column that says so."""
    if not table.legend or any(column.wide for column in table.columns):
        return ""
    meant = "; ".join(f"<b>{prose(entry.symbol)}</b>: {prose(entry.meaning)}" for entry in table.legend)
    return f'<p class="soft meanings">{meant}.</p>'


def _hint(of: Column | Cell) -> str:
    return "" if of.quantity is None else _attribute("title", of.quantity.hint)


def _cells(table: Table, row: Sequence[Cell | str]) -> str:
    out = []
    for place, (column, given) in enumerate(zip(table.columns, row, strict=True)):
        cell = Cell(given) if isinstance(given, str) else given
        kind = {"number": "n", "text": "t", "prose": "prose"}[column.kind]
        tone = f" tone-{cell.tone}" if cell.tone and not cell.mark else ""
        value = ""
        if table.sortable and (column.kind == "number" or cell.value is not None):
            value = f' data-value="{"" if cell.value is None else escape(str(cell.value))}"'
        tag, scope = ("th", ' scope="row"') if place == 0 and not table.sortable else ("td", "")
        label = _attribute("data-label", plain_symbols(column.title) if place and table.stacked else "")
        out.append(f'<{tag}{scope} class="{kind}{tone}"{value}{label}{_hint(cell)}>{_cell(cell)}</{tag}>')
    return "".join(out)


def _cell(cell: Cell) -> str:
    if cell.token:
        before = f'<span class="before"><bdi dir="ltr">{escape(cell.note)}</bdi></span>'
        return f'<div class="context">{before}<mark><bdi>{escape(cell.text)}</bdi></mark></div>'
    mark = f'<b class="tone-{cell.tone}">{prose(cell.mark)}</b> ' if cell.mark else ""
    note = f'<span class="soft note">{prose(cell.note)}</span>' if cell.note else ""
    return f"{mark}{prose(cell.text)}{note}"


def _item(item: Item, figures: Figures) -> str:
    opened = " open" if item.expanded else ""
    return (
        f'<details class="decision {item.tone}"{opened}><summary><span class="dot" aria-hidden="true"></span>'
        f'<span class="stage">{prose(item.name)}</span><span class="verdict">{prose(item.word)}</span>'
        f'<span class="reason">{prose(item.text)}</span></summary>'
        f'<div class="body">{"".join(f"<div>{_block(block, figures)}</div>" for block in item.body)}</div></details>\n'
    )


def _card(card: Card) -> str:
    """Both coordinates side by side; neither is held against the other."""
    both = (("raw", card.raw), ("centered", card.centered))
    values = "".join(f'<p class="value {name}"><b>{number(value)}</b></p>' for name, value in both)
    missing = f" <em>{escape(card.note)}</em>" if None in (card.raw, card.centered) else ""
    said = f'<p class="judged{f" tone-{card.tone}" if card.tone else ""}">{prose(card.verdict)}</p>'
    return (
        f'<article class="card" data-key="{escape(card.quantity.key)}"><h3><span title="{escape(card.quantity.hint)}">'
        f"{prose(card.name)} <small>({prose(card.quantity.symbol)})</small></span></h3>"
        f'{values}{said if card.verdict else ""}<p class="meaning">{prose(card.quantity.meaning)}{missing}</p></article>'
    )


def _figure(figure: Figure, figures: Figures) -> str:
    title = f"<h4{_attribute('title', figure.hint)}>{prose(figure.title)}</h4>"
    caption = f"<figcaption>{prose(figure.caption)}</figcaption>" if figure.caption else ""
    label, shown = escape(figure.title), ""
    if figures == "static":
        picture = base64.b64encode(drawn([figure], titled=False).encode()).decode()
        shown = f'<div class="chart"><img alt="{label}" src="data:image/svg+xml;base64,{picture}"></div>'
    elif figures == "script":
        data = json.dumps(interactive(figure), separators=(",", ":"), allow_nan=False)
        for color in ON_PAGE:
            data = data.replace(f'"{color}"', f'"{_on_page(color)}"')
        # Nothing in the data can end their element.
        data = data.replace("<", "\\u003c").replace(">", "\\u003e")
        shown = (
            f'<div class="chart" role="img" aria-label="{label}"></div><script type="application/json">{data}</script>'
        )
    return f'<figure data-name="{escape(figure.name)}">{title}{shown}{caption}</figure>'


def _group(group: Group, figures: Figures) -> str:
    inside = to_html(group.blocks, figures)
    match group.layout:
        case "section":
            return f"<section{_attribute('id', group.anchor)}>{inside}</section>"
        case "cards":
            chips = "".join(f'<span class="chip {_color_class(color)}">{name}</span>' for name, color in TONES.items())
            return f'<p class="legend">{chips}</p><div class="cards">{inside}</div>'
        case "verdict":
            return f'<div class="verdict-box">{inside}</div>'
        case "columns":
            return f'<div class="blocks">{inside}</div>'
        case "tabs":
            return _tabs([block for block in group.blocks if isinstance(block, Table)])
        case layout:
            return f'<div class="plots">{_legend(group, figures)}<div class="figures {layout}">{inside}</div></div>'


def _legend(group: Group, figures: Figures) -> str:
    """The series of a row of figures: a click hides one in all of them. A single series needs no legend."""
    series = dict(pair for block in group.blocks if isinstance(block, Figure) for pair in block.series)
    if figures != "script" or len(series) < 2:
        return ""
    chips = "".join(
        f'<button type="button" class="chip {_color_class(color)}" data-series="{escape(name)}" aria-pressed="true" '
        f'title="Show or hide">{escape(name)}</button>'
        for name, color in series.items()
    )
    return f'<p class="legend">{chips}</p>'


def _tabs(tables: Sequence[Table]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" aria-selected="{"false" if i else "true"}">{prose(table.title)}</button>'
        for i, table in enumerate(tables)
    )
    panels = "".join(
        f'<div role="tabpanel"{" hidden" if i else ""}>{_table(replace(table, title=""))}</div>'
        for i, table in enumerate(tables)
    )
    return f'<div class="tabs"><div class="tablist" role="tablist">{buttons}</div>{panels}</div>'
