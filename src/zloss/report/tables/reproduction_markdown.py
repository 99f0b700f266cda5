"""A reproduction as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zloss.report.tables.reproduction import (
    NOT_COMPARABLE,
    claims_tally,
    deviations,
    missing_numbers,
    reproduction_table,
)
from zloss.results.reproduction import PROFILES, ReproductionRecord, TextSource


def reproduction_markdown(record: ReproductionRecord, figures: Sequence[Path] = ()) -> str:
    """The whole page; paths of figures are relative to it."""
    provenance = record.provenance
    parts = [
        f"# {record.title} ({record.label})",
        f"Profile `{record.profile}`: {PROFILES[record.profile]}.",
        f"    {provenance.command}",
        "## Numbers" if record.columns else "## Checklist",
        _table(record),
    ]
    if record.columns and not record.comparable:
        parts.append(NOT_COMPARABLE + "\n\n" + _bullets(deviations(record)))
    if remarks := [*missing_numbers(record), *record.notes]:
        parts.append(_bullets(remarks))
    parts += [f"![{record.title}]({figure.as_posix()})" for figure in figures]
    if record.claims:
        parts += ["## Claims", _claims(record) if record.judged else f"{claims_tally(record)}."]
    if record.not_stated_by_the_paper:
        lines = [f"| {_safe(choice.setting)} | {_safe(choice.ours)} |" for choice in record.not_stated_by_the_paper]
        parts += [
            "## Not stated by the paper",
            "What the paper leaves open, and our choice at its scale:",
            "\n".join(["| setting | ours |", "|---|---|", *lines]),
        ]
    if record.texts:
        parts += ["## Text", _bullets([_text(text) for text in record.texts])]
    versions = ", ".join(f"{name} {getattr(provenance, name)}" for name in ("zloss", "torch", "transformers", "python"))
    parts += ["## Provenance", f"{versions}; {provenance.threads} threads. {_seconds(record)}"]
    return "\n\n".join(parts) + "\n"


def _seconds(record: ReproductionRecord) -> str:
    """Recipes share their audits and training runs, so the time of a recipe alone would mislead."""
    own = f"This recipe took {record.provenance.seconds:g} s"
    audits = [sum(audit["seconds"].values()) for audit in record.details.get("audits", ()) if "seconds" in audit]
    if audits:
        return f"{own}; the audits it reads {sum(audits):.0f} s, once for all recipes of a call."
    runs = record.details.get("training_seconds")
    return (
        f"{own}; the {runs['runs']} runs it reads {runs['seconds']:.0f} s, once for all recipes." if runs else f"{own}."
    )


def _table(record: ReproductionRecord) -> str:
    table = reproduction_table(record)
    rule = ["---" if i < table.keys else "---:" for i in range(len(table.header))]
    lines = [[_safe(cell) for cell in cells] for cells in (table.header, *(line.cells for line in table.lines))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))


def _claims(record: ReproductionRecord) -> str:
    lines = ["| the paper's statement | on our numbers | evidence | on the paper's own numbers |", "|---|---|---|---|"]
    for claim in record.claims:
        statement = claim.statement + (f" ({claim.reading})" if claim.reading else "")
        own = "–" if claim.on_the_papers_numbers is None else claim.on_the_papers_numbers.verdict
        cells = (statement, f"**{claim.verdict}**", claim.evidence, own)
        lines.append(f"| {' | '.join(_safe(cell) for cell in cells)} |")
    return f"{claims_tally(record)}. In brackets: what of the check is ours.\n\n" + "\n".join(lines)


def _text(text: TextSource) -> str:
    name = f"`{text.name}`: {text.title}" if text.name != text.title else f"`{text.name}`"
    digest = f", sha256 `{text.sha256}`" if text.sha256 else ""
    return f"{name}; source: {text.source}; licence: {text.licence}{digest}"


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _safe(text: str) -> str:
    """A bar would end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
