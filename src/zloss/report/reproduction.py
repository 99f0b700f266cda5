"""A reproduction as a document: ours, the paper's next to it, the ratio, and the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zloss.report.document import Cell, Column, Document, Heading, Plain, Row, Table, Text, Tone, show
from zloss.report.numbers import MISSING, factor, number
from zloss.results.quantities import define, symbol
from zloss.results.reproduction import NOT_JUDGED, PROFILES, ReproducedLine, ReproductionRecord, TextSource, Verdict

NOT_COMPARABLE = (
    "The numbers are not comparable with the paper's (see the deviations); its claims may still be tested on ours."
)
SMALLEST_PLAIN = 1e-4
"""A number of the paper below this is shown as a power of ten."""
VERDICTS: dict[Verdict, tuple[str, Tone]] = {
    "holds": ("hold", "pass"),
    "does not hold": ("do not hold", "fired"),
    "cannot be tested here": ("cannot be tested here", "open"),
}
"""Verdict on a claim → its plural and its tone."""
CLAIMS = ("the paper's statement", "on our numbers", "evidence", "on the paper's own numbers")


def reproduction_document(record: ReproductionRecord, figures: Sequence[Path] = ()) -> Document:
    """The whole record; paths of figures are relative to the Markdown page."""
    provenance = record.provenance
    versions = ", ".join(f"{name} {getattr(provenance, name)}" for name in ("zloss", "torch", "transformers", "python"))
    document: Document = [
        Heading(f"{record.title} ({record.label})", 1),
        Text(f"Profile `{record.profile}`: {PROFILES[record.profile]}."),
        Text(Plain(provenance.command), "code"),
        Heading("Numbers" if record.columns else "Checklist"),
        reproduction_table(record),
        *_remarks(record),
        *(Text(f"![{record.title}]({figure.as_posix()})") for figure in figures),
        *([Heading("Claims"), *_claims(record)] if record.claims else []),
    ]
    if record.not_stated_by_the_paper:
        choices = tuple((choice.setting, choice.ours) for choice in record.not_stated_by_the_paper)
        document += [
            Heading("Not stated by the paper"),
            Text("What the paper leaves open, and our choice at its scale:"),
            Table((Column("setting", "prose"), Column("ours", "prose")), choices, sortable=False),
        ]
    if record.texts:
        document += [Heading("Text"), *(Text(_text(text), "item") for text in record.texts)]
    said = f"{versions}; {provenance.threads} threads. {_seconds(record)}"
    return [*document, Heading("Provenance"), Text(said)]


def reproduction_summary(record: ReproductionRecord) -> Document:
    """What a terminal shows: the verdicts in one line, the table, what deviates, every claim, and our choices."""
    document: Document = [
        Heading(f"{record.label}: {record.title} ({record.profile} profile)", 1),
        *([Text(f"Claims of the paper on our numbers: {claims_tally(record)}.")] if record.claims else []),
        reproduction_table(record),
        *_remarks(record),
        *(_claims(record)[1:] if record.claims and record.judged else []),
    ]
    if record.not_stated_by_the_paper:
        # Settings that share one choice, together.
        grouped: dict[str, list[str]] = {}
        for choice in record.not_stated_by_the_paper:
            grouped.setdefault(choice.ours, []).append(choice.setting)
        document.append(Text("Not stated by the paper, so our choice:"))
        document += [Text(f"{', '.join(settings)}: {ours}", "item") for ours, settings in grouped.items()]
    return document


def reproduction_table(record: ReproductionRecord) -> Table:
    """Ours, then the paper's line that belongs to it and the ratio."""
    columns = record.columns
    names = tuple(dict.fromkeys(name for row in record.rows for name in row.key(columns)))
    side = (Column("", "text"),) if columns else ()
    rows: list[Row] = []
    for row in record.rows:
        key = row.key(columns)
        ours = ("ours",) if columns else ()
        rows.append(
            (*(Plain(show(key[name])) if name in key else "" for name in names), *ours, *_cells(row.extra, columns))
        )
        if row.beside is None or not columns:
            continue
        blank = ("",) * len(names)
        paper = Cell(_paper(row, columns), tone="paper")
        rows.append((*blank, paper, *(Cell(text, tone="paper") for text in _printed(row, columns))))
        ratios = (Cell(factor(row.ratio.get(column)), tone="soft") for column in columns)
        rows.append((*blank, Cell("ours/paper", tone="soft"), *ratios))
    titles = tuple(Column(_title(name), "text") for name in names)
    shown = (*titles, *side, *map(Column.of, columns))
    return Table(shown, tuple(rows), keys=len(shown) - len(columns), name="numbers", sortable=False)


def claims_tally(record: ReproductionRecord) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"; at the smoke profile that they are not judged."""
    if not record.judged:
        return f"{len(record.claims)} claims, {NOT_JUDGED}"
    counts = {verdict: sum(claim.verdict == verdict for claim in record.claims) for verdict in VERDICTS}
    return ", ".join(f"{counts[verdict]} {words}" for verdict, (words, _) in VERDICTS.items())


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


def _remarks(record: ReproductionRecord) -> Document:
    document: Document = []
    if record.columns and not record.comparable:
        document.append(Text(NOT_COMPARABLE))
        document += [Text(sentence, "item") for sentence in deviations(record)]
    remarks = [*missing_numbers(record), *record.notes]
    return [*document, *(Text(sentence, "item") for sentence in remarks)]


def _claims(record: ReproductionRecord) -> Document:
    """The counts, then every claim with its evidence where they are judged."""
    if not record.judged:
        return [Text(f"{claims_tally(record)}.")]
    rows = tuple(
        (
            claim.statement + (f" ({claim.reading})" if claim.reading else ""),
            Cell(claim.verdict, claim.verdict, VERDICTS[claim.verdict][1]),
            claim.evidence,
            MISSING if claim.on_the_papers_numbers is None else claim.on_the_papers_numbers.verdict,
        )
        for claim in record.claims
    )
    kinds = ("prose", "text", "prose", "prose")
    columns = tuple(Column(title, kind) for title, kind in zip(CLAIMS, kinds, strict=True))  # type: ignore[arg-type]
    return [
        Text(f"{claims_tally(record)}. In brackets: what of the check is ours."),
        Table(columns, rows, name="claims"),
    ]


def _cells(numbers: Mapping[str, Any], columns: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(Cell(_cell(value := numbers.get(column)), value if _numeric(value) else None) for column in columns)


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    return MISSING if value is None else number(value) if _numeric(value) else show(value)


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


def _text(text: TextSource) -> str:
    name = f"`{text.name}`: {text.title}" if text.name != text.title else f"`{text.name}`"
    digest = f", sha256 `{text.sha256}`" if text.sha256 else ""
    return f"{name}; source: {text.source}; licence: {text.licence}{digest}"


def _seconds(record: ReproductionRecord) -> str:
    """Recipes share their audits and training runs, so the time of a recipe alone would mislead."""
    own = f"This recipe took {record.provenance.seconds:g} s"
    try:
        audits = [sum(audit["seconds"].values()) for audit in record.details.get("audits", ()) if "seconds" in audit]
        if audits:
            return f"{own}; the audits it reads {sum(audits):.0f} s, once for all recipes of a call."
        if runs := record.details.get("training_seconds"):
            return f"{own}; the {runs['runs']} runs it reads {runs['seconds']:.0f} s, once for all recipes."
    except (TypeError, ValueError, KeyError, AttributeError):
        # Details have no schema: a damaged file may hold anything there.
        pass
    return f"{own}."
