"""A reproduction as a document: ours, the paper's next to it, the ratio, and the claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zloss.report.document import (
    Cell,
    Column,
    Columns,
    Document,
    Heading,
    Plain,
    Row,
    Table,
    Text,
    Tone,
    cell,
    show,
    table,
)
from zloss.report.numbers import MISSING, factor
from zloss.results.quantities import define, symbol
from zloss.results.reproduction import (
    NOT_JUDGED,
    PROFILES,
    ReproducedLine,
    ReproductionRecord,
    TextSource,
    Verdict,
)

NOT_COMPARABLE = (
    "The numbers are not comparable with the paper's (see the deviations); its claims can still be tested on ours."
)
SMALLEST_PLAIN = 1e-4
"""A number of the paper below this is shown as a power of ten."""
VERDICTS: dict[Verdict, tuple[str, Tone]] = {
    "holds": ("hold", "pass"),
    "does not hold": ("do not hold", "fired"),
    "cannot be tested here": ("cannot be tested here", "open"),
}
"""Verdict on a claim → its plural and its tone."""


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
    blank = ("",) * len(names)
    rows: list[Row] = []
    for row in record.rows:
        key = row.key(columns)
        keys = tuple(Plain(show(key[name])) if name in key else "" for name in names)
        rows.append((*keys, *(("ours",) if columns else ()), *(_cell(row.extra.get(column)) for column in columns)))
        if row.beside is not None and columns:
            # The paper's line by what differs from ours.
            theirs = row.beside
            differing = [show(theirs[name]) for name in key if name in theirs and theirs[name] != key[name]]
            paper = f"paper, {', '.join(differing)}" if differing else "paper"
            rows.append((*blank, *(Cell(text, tone="paper") for text in (paper, *_printed(row, columns)))))
            ratios = (factor(row.ratio.get(column)) for column in columns)
            rows.append((*blank, *(Cell(text, tone="soft") for text in ("ours/paper", *ratios))))
    titles = (symbol(name) if define(name) else name.replace("_", " ") for name in names)
    shown = (*(Column(title, "text") for title in titles), *((Column("", "text"),) if columns else ()))
    return Table((*shown, *map(Column.of, columns)), tuple(rows), keys=len(shown), name="numbers", sortable=False)


def claims_tally(record: ReproductionRecord) -> str:
    """ "3 hold, 0 do not hold, 8 cannot be tested here"; for the smoke profile, that they are not checked."""
    if not record.judged:
        return f"{len(record.claims)} claims, {NOT_JUDGED}"
    counts = {verdict: sum(claim.verdict == verdict for claim in record.claims) for verdict in VERDICTS}
    return ", ".join(f"{counts[verdict]} {words}" for verdict, (words, _) in VERDICTS.items())


def deviations(record: ReproductionRecord) -> list[str]:
    """How our rows differ from the paper's setting, each difference once, with the models it concerns if not all."""
    models: dict[str, list[str]] = {}
    for row in record.rows:
        for sentence in row.deviations:
            models.setdefault(sentence, []).append(str(row.extra.get("model", "")))
    every = {str(row.extra.get("model", "")) for row in record.rows}
    return [
        sentence if set(found) == every else f"{', '.join(dict.fromkeys(found))}: {sentence}"
        for sentence, found in models.items()
    ]


def _remarks(record: ReproductionRecord) -> Document:
    """What deviates from the paper, why numbers of ours do not exist, and the notes."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in record.rows:
        name = ", ".join(show(value) for value in row.key(record.columns).values())
        for column, why in row.reasons.items():
            missing.setdefault((name, why), []).append(symbol(column))
    absent = [f"{name}: no {', '.join(columns)}: {why}" for (name, why), columns in missing.items()]
    differs = bool(record.columns) and not record.comparable
    items = [*(deviations(record) if differs else []), *absent, *record.notes]
    return [*([Text(NOT_COMPARABLE)] if differs else []), *(Text(sentence, "item") for sentence in items)]


def _claims(record: ReproductionRecord) -> Document:
    """The counts, then every claim with its evidence, if claims are checked."""
    if not record.judged:
        return [Text(f"{claims_tally(record)}.")]

    columns: Columns = (
        (
            Column("the paper's statement", "prose"),
            lambda claim: claim.statement + (f" ({claim.reading})" if claim.reading else ""),
        ),
        (
            Column("on our numbers", "text"),
            lambda claim: Cell(claim.verdict, claim.verdict, VERDICTS[claim.verdict][1]),
        ),
        (Column("evidence", "prose"), lambda claim: claim.evidence),
        (
            Column("on the paper's own numbers", "prose"),
            lambda claim: getattr(claim.on_the_papers_numbers, "verdict", MISSING),
        ),
    )
    said = f"{claims_tally(record)}. In brackets: the part of the check that is ours."
    return [Text(said), table(record.claims, columns, name="claims")]


def _cell(value: Any) -> Cell:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(show(value))
    return cell(value)


def _printed(row: ReproducedLine, columns: tuple[str, ...]) -> list[str]:
    """The paper's numbers as it prints them, zeros at the end included, unless a power of ten is easier to read."""
    texts = []
    for column in columns:
        value, printed = (row.beside or {}).get(column), row.printed.get(column)
        plain = isinstance(value, (int, float)) and abs(value) >= SMALLEST_PLAIN
        texts.append(printed if printed and plain else _cell(value).text)
    return texts


def _text(text: TextSource) -> str:
    name = f"`{text.name}`: {text.title}" if text.name != text.title else f"`{text.name}`"
    digest = f", sha256 `{text.sha256}`" if text.sha256 else ""
    return f"{name}; source: {text.source}; license: {text.licence}{digest}"


def _seconds(record: ReproductionRecord) -> str:
    """Recipes share their audits and training runs, so the time of a recipe alone would mislead."""
    own = f"This recipe took {record.provenance.seconds:g} s"
    try:
        audits = [sum(audit["seconds"].values()) for audit in record.details.get("audits", ()) if "seconds" in audit]
        if audits:
            return f"{own}; the audits it reads took {sum(audits):.0f} s, once for all recipes of a call."
        if runs := record.details.get("training_seconds"):
            return f"{own}; the {runs['runs']} runs it reads took {runs['seconds']:.0f} s, once for all recipes."
    except (TypeError, ValueError, KeyError, AttributeError):
        # Details have no schema: a damaged file may hold anything there.
        pass
    return f"{own}."
