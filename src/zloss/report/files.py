"""Results and their decisions as one page or one terminal output, and the files of results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from zloss.decide.answer import DecidedResults, audit_names, decide_records
from zloss.report.audit import (
    audit_document,
    audit_summary,
    decision_document,
    side_by_side_document,
    tally,
)
from zloss.report.audit_figures import audit_figures, thin
from zloss.report.comparison import comparison_document, comparison_page, comparison_summary
from zloss.report.document import Document, Figure, Group, Heading, Plain, Text, to_markdown
from zloss.report.drift import drift_document, drift_figures, drift_summary
from zloss.report.figures import write_figures
from zloss.report.html import MAX_BYTES, to_page
from zloss.report.implementation_audit import implementation_audit_document, implementation_audit_summary
from zloss.report.loss_audit import loss_audit_document, loss_audit_summary
from zloss.report.recommendation import recommendation_document, recommendation_summary
from zloss.report.reproduction import reproduction_document, reproduction_summary
from zloss.report.router import measured_document, router_scale_document
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import DecisionMaps
from zloss.results.drift import Drift
from zloss.results.files import PLURALS, Reported, Result
from zloss.results.folder import DECISIONS_FILE, FIGURES, FORMATS, PAGE_FILE, TEXT_FILE, TOKENS_FILE, remove_leftovers
from zloss.results.io import write_text
from zloss.results.recommendation import Recommendation
from zloss.results.record import ResultRecord


def render_page(results: DecidedResults, *, static: bool = False) -> str:
    """The page under 3 MB: the tokens of the scatter panels are thinned, extremes kept, until it fits."""
    for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 0.003, 0.0):
        audits = tuple(thin(report, share) for report in results.audits)
        text = to_page(page_document(replace(results, audits=audits)), page_title(results), static=static)
        if len(text.encode("utf-8", errors="replace")) < MAX_BYTES:
            break
    return text


NOTEBOOK_TOKENS = 250
"""Tokens of a scatter panel in a notebook, which keeps every picture in its file."""


def notebook_html(record: ResultRecord) -> str | None:
    """The page of one result as a frame for a notebook, without scripts; None for a record without a page."""
    if not isinstance(record, Reported):
        return None
    if isinstance(record, AuditReport) and record.figures.geometry is not None:
        record = thin(record, NOTEBOOK_TOKENS / max(len(record.figures.geometry), 1))
    page = escape(render_page(decide_records([record]), static=True))
    return f'<iframe sandbox width="100%" height="640" style="border:0" srcdoc="{page}"></iframe>'


def page_title(results: DecidedResults) -> str:
    """What the results are about."""
    labels = [record.label for record in results.reproductions]
    titles = (
        (results.audits, " vs ".join(audit_names(results.audits))),
        (results.comparisons, "Comparison of training runs"),
        (results.loss_audits, "Audit of a loss"),
        (results.implementation_audits, "Audit of the implementation"),
        (results.router_scales or results.measured_routers, "Scale of a router Z-loss"),
        (
            results.recommendations,
            "Recommendation for " + ", ".join(one.tested.model for one in results.recommendations),
        ),
        (results.drifts, "Drift of " + ", ".join(drift.model for drift in results.drifts)),
        (labels[1:], "Reproductions of the paper"),
    )
    return next((title for records, title in titles if records), f"Reproduction of {', '.join(labels)}")


def page_document(results: DecidedResults) -> Document:
    """Every result in a separate section, its answer first, and the shared decision map where there is no audit."""
    shared, title = results.shared, page_title(results)
    named = list(zip(audit_names(results.audits), results.audits, strict=True))
    several = len(named) > 1
    above: Document = [Text(f"{len(named)} audits side by side", "kicker"), Heading(Plain(title), 1)]
    decided = []
    if shared is not None:
        decided = [
            decision_document(shared.decisions, Text(f"{tally(shared.decisions)}.", "lead"), results.maps[0].models)
        ]
    routers = [*map(measured_document, results.measured_routers), *map(router_scale_document, results.router_scales)]
    before = _section(
        "recommendation", "Recommendation", "", [recommendation_document(found) for found in results.recommendations]
    )
    if several:
        before += _section("compare", "Side by side", "", [above, side_by_side_document(named)])
    for i, ((name, report), one) in enumerate(zip(named, results.maps if named else (), strict=True)):
        blocks = audit_document(report, name=name, key=f"a{i}", models=one.models, links=not several)
        before += _section(f"a{i}", name if several else "", "", [blocks])
    sections: tuple[tuple[str, str, str, Sequence[Document]], ...] = (
        ("loss-audits", "Loss", "Audit of the loss", [*map(loss_audit_document, results.loss_audits)]),
        (
            "implementation-audits", "Implementation", "Audit of the implementation",
            [*map(implementation_audit_document, results.implementation_audits)],
        ),
        ("comparisons", "Training", "Training runs compared", [*map(comparison_document, results.comparisons)]),
        ("drift", "Drift", "", [*map(drift_document, results.drifts)]),
        ("routers", "Routers", "Router Z-loss", routers),
        ("decisions", "Decisions", "Decision map", decided),
        ("reproductions", "Reproductions", "", [*map(reproduction_document, results.reproductions)]),
    )  # fmt: skip
    # The title of a page says what its only kind of result is.
    alone = not before and sum(bool(parts) for *_, parts in sections if parts is not decided) == 1
    after = [
        block
        for anchor, link, name, parts in sections
        for block in _section(anchor, link, "" if alone and parts is not decided else name, parts)
    ]
    return [*before, *([Heading(title, 1)] if shared is not None else []), *after]


def _section(anchor: str, link: str, title: str, parts: Sequence[Document]) -> Document:
    """The documents of one kind of result under its title; nothing if there are none."""
    blocks = [*([Heading(title)] if title else []), *(block for part in parts for block in part)]
    return [Group("section", tuple(blocks), anchor, link)] if parts else []


def terminal_document(results: DecidedResults, *, verbose: bool = False) -> Document:
    """Audits of losses and implementations and comparisons, each with its answer; one audit (with `verbose` all its numbers),
    several side by side, or the shared decision map; then recommendations, drifts, router scales and reproductions."""
    audits, maps = results.audits, results.maps
    if len(audits) == 1:
        decided = [audit_summary(audits[0], models=maps[0].models, verbose=verbose)]
    elif audits:
        named = list(zip(audit_names(audits), audits, strict=True))
        decided = [side_by_side_document(named, models=[one.models for one in maps])]
    else:
        decided = [
            decision_document(one.decisions, Heading(f"Decision map: {tally(one.decisions)}"), one.models)
            for one in maps
        ]
    parts = (
        *map(loss_audit_summary, results.loss_audits),
        *(comparison_summary(comparison, verbose=verbose) for comparison in results.comparisons),
        *map(implementation_audit_summary, results.implementation_audits),
        *decided,
        *map(recommendation_summary, results.recommendations),
        *map(drift_summary, results.drifts),
        *map(measured_document, results.measured_routers),
        *(router_scale_document(scales, cited=False) for scales in results.router_scales),
        *map(reproduction_summary, results.reproductions),
    )
    return [block for part in parts for block in part]


def write_result(folder: Path, results: DecidedResults, *, figures: bool = True) -> list[Path]:
    """The record of the one result in `results`, comparison.md of a comparison, report.html, then figures.

    Files are written atomically, and no file of an earlier result remains.
    """
    (record,) = (record for name in PLURALS.values() for record in getattr(results, name))
    file, page, text = folder / record.FILE, folder / PAGE_FILE, folder / TEXT_FILE
    written = [file, page]
    # The record of a recommendation comes last: its presence says that the recommendation is finished.
    finished = isinstance(record, Recommendation)
    if not finished:
        record.write(file)
    if isinstance(record, Comparison):
        write_text(text, to_markdown(comparison_page(record)))
        written.insert(1, text)
    write_text(page, render_page(results))
    written += write_figures(folder / FIGURES, _figures_of(record) if figures else {})
    # The token table of an audit is written by the pass over the text.
    remove_leftovers(folder, [*written, *([folder / TOKENS_FILE] if isinstance(record, AuditReport) else [])])
    if finished:
        record.write(file)
    return written


def _figures_of(record: Any) -> dict[str, list[Figure]]:
    if isinstance(record, AuditReport):
        return audit_figures(record)
    return drift_figures(record) if isinstance(record, Drift) else {}


def write_joined(
    folder: Path,
    results: DecidedResults,
    sources: Sequence[Result],
    *,
    figures: bool = False,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """report.html, decisions.json, and with `figures` the figure files; `sources` are the joined results.

    A report that contains only reproductions has no decision map and no decisions.json.
    """
    written = [folder / PAGE_FILE]
    write_text(folder / PAGE_FILE, render_page(results))
    if results.maps:
        # The last two parts name a result; a whole path would show the folders of someone's machine.
        names = tuple("/".join(result.path.absolute().parts[-2:]) for result in sources)
        DecisionMaps(names, results.maps).write(folder / DECISIONS_FILE)
        written.append(folder / DECISIONS_FILE)
    audits = list(zip(audit_names(results.audits), results.audits, strict=True))
    drifts = [(drift.model, drift) for drift in results.drifts]
    for group in (audits, drifts) if figures else ():
        for name, record in group:
            plain = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "audit"
            place = folder / FIGURES / plain if len(group) > 1 else folder / FIGURES
            written += write_figures(place, _figures_of(record), formats=formats)
    if folder.absolute() not in {result.path.absolute().parent for result in sources}:
        remove_leftovers(folder, written)
    return written
