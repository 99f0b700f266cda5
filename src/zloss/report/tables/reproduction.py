"""A reproduction as lines of text, for terminal, page and Markdown: ours, the paper's beside it, the ratio, and the claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zloss.report.tables.plain import show
from zloss.report.text.numbers import MISSING, factor, number
from zloss.results.quantities import define, symbol
from zloss.results.reproduction import NOT_JUDGED, ReproducedLine, ReproductionRecord, Verdict

NOT_COMPARABLE = (
    "The numbers are not comparable with the paper's (see the deviations); its claims may still be tested on ours."
)
SMALLEST_PLAIN = 1e-4
"""A number of the paper below this is shown as a power of ten."""
VERDICTS: tuple[tuple[Verdict, str], ...] = (
    ("holds", "hold"),
    ("does not hold", "do not hold"),
    ("cannot be tested here", "cannot be tested here"),
)


@dataclass(frozen=True)
class ShownLine:
    """One printed line."""

    cells: tuple[str, ...]
    of: str
    """ "ours", "paper" or "ratio"."""


@dataclass(frozen=True)
class ReproductionTable:
    """Header and lines; the first `keys` columns say what a line is about, the others are numbers."""

    header: tuple[str, ...]
    keys: int
    lines: tuple[ShownLine, ...]


def reproduction_table(record: ReproductionRecord) -> ReproductionTable:
    """Ours, then the paper's line that stands beside it and the ratio."""
    names = tuple(dict.fromkeys(name for row in record.rows for name in row.key(record.columns)))
    columns = record.columns
    side = ("",) if columns else ()
    lines: list[ShownLine] = []
    for row in record.rows:
        key = row.key(columns)
        ours = ("ours",) if columns else ()
        cells = (*(show(key[name]) if name in key else "" for name in names), *ours, *_cells(row.extra, columns))
        lines.append(ShownLine(cells, "ours"))
        if row.beside is None or not columns:
            continue
        blank = ("",) * len(names)
        lines.append(ShownLine((*blank, _paper(row, columns), *_printed(row, columns)), "paper"))
        ratios = tuple(factor(row.ratio.get(column)) for column in columns)
        lines.append(ShownLine((*blank, "ours / paper", *ratios), "ratio"))
    header = (*(_title(name) for name in names), *side, *(symbol(column) for column in columns))
    return ReproductionTable(header, len(header) - len(columns), tuple(lines))


def claims_tally(record: ReproductionRecord) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"; at the smoke profile that they are not judged."""
    if not record.judged:
        return f"{len(record.claims)} claims, {NOT_JUDGED}"
    counts = {verdict: sum(claim.verdict == verdict for claim in record.claims) for verdict, _ in VERDICTS}
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in VERDICTS)


def deviations(record: ReproductionRecord) -> list[str]:
    """In what our lines differ from the paper's setting, each once, with the models it concerns where not all."""
    models: dict[str, list[str]] = {}
    for row in record.rows:
        for sentence in row.deviations:
            models.setdefault(sentence, []).append(_model(row))
    every = {_model(row) for row in record.rows}
    return [
        sentence if set(found) == every else f"{', '.join(dict.fromkeys(found))}: {sentence}"
        for sentence, found in models.items()
    ]


def missing_numbers(record: ReproductionRecord) -> list[str]:
    """Why numbers of ours do not exist, one sentence per line and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in record.rows:
        name = ", ".join(show(value) for value in row.key(record.columns).values())
        for column, why in row.reasons.items():
            found.setdefault((name, why), []).append(symbol(column))
    return [f"{name}: no {', '.join(columns)}: {why}" for (name, why), columns in found.items()]


def _cells(numbers: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_cell(numbers.get(column)) for column in columns)


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    return number(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else show(value)


def _printed(row: ReproducedLine, columns: tuple[str, ...]) -> tuple[str, ...]:
    """The paper's numbers as it prints them, zeros at the end included, unless a power of ten is easier to read."""
    values = row.beside or {}

    def text(column: str) -> str:
        value, printed = values.get(column), row.printed.get(column)
        plain = isinstance(value, (int, float)) and abs(value) >= SMALLEST_PLAIN
        return printed if printed and plain else _cell(value)

    return tuple(map(text, columns))


def _model(row: ReproducedLine) -> str:
    return str(row.extra.get("model", ""))


def _paper(row: ReproducedLine, columns: tuple[str, ...]) -> str:
    """The paper's line by what differs from ours."""
    ours, theirs = row.key(columns), row.beside or {}
    differing = [show(theirs[name]) for name in ours if name in theirs and theirs[name] != ours[name]]
    return f"paper, {', '.join(differing)}" if differing else "paper"


def _title(name: str) -> str:
    found = define(name)
    return name.replace("_", " ") if found is None else found.symbol
