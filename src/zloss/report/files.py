"""The files of reported results: the record, its page, and the figures on request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from zloss.decide.decided_results import DecidedResults, audit_names
from zloss.report.charts.drift import source_panels, transport_panels
from zloss.report.charts.matplotlib_files import FIGURES, FORMATS, write_figures, write_panels
from zloss.report.html.page import write_page
from zloss.report.tables.comparison_markdown import comparison_markdown
from zloss.results.audit import AuditReport
from zloss.results.decision import DecisionMaps
from zloss.results.drift import FILE as DRIFT_FILE
from zloss.results.drift import Drift
from zloss.results.files import Result, write_record
from zloss.results.folder_owner import DECISIONS_FILE, PAGE_FILE, remove_leftovers
from zloss.results.recommendation import FILE as RECOMMENDATION_FILE
from zloss.results.recommendation import Recommendation
from zloss.results.writing import write_text

DRIFT_INCHES = (3.6, 2.9)
"""Size of a panel of curves over checkpoints."""
DRIFT_FIGURES = {"drift_source": source_panels, "drift_transport": transport_panels}
FIGURE_NAMES = (*FIGURES, *DRIFT_FIGURES)
"""Names of the figure files, without their formats."""


def write_audit(folder: Path, report: AuditReport, *, figures: bool = True) -> list[Path]:
    """report.json, report.html, then figures, of an audit with its decisions; each appears whole or not at all."""
    record, page = folder / "report.json", folder / PAGE_FILE
    write_record(record, report)
    write_page(page, DecidedResults(audits=(report,)))
    written = [record, page, *(write_figures(folder / "figures", report) if figures else [])]
    clear_leftovers(folder, written)
    return written


def write_comparison(folder: Path, results: DecidedResults) -> list[Path]:
    """comparison.json, comparison.md and report.html of the one comparison in `results`."""
    (judged,) = results.comparisons
    record, text, page = (folder / name for name in ("comparison.json", "comparison.md", PAGE_FILE))
    write_record(record, judged.comparison)
    write_text(text, comparison_markdown(judged.comparison))
    write_page(page, results)
    written = [record, text, page]
    clear_leftovers(folder, written)
    return written


def write_drift(folder: Path, drift: Drift, *, figures: bool = True) -> list[Path]:
    """drift.json, report.html, then figures; each appears whole or not at all."""
    record, page = folder / DRIFT_FILE, folder / PAGE_FILE
    write_record(record, drift)
    write_page(page, DecidedResults(drifts=(drift,)))
    written = [record, page, *(write_drift_figures(folder / "figures", drift) if figures else [])]
    clear_leftovers(folder, written)
    return written


def write_drift_figures(folder: Path, drift: Drift, *, formats: Sequence[str] = FORMATS) -> list[Path]:
    """drift_source and drift_transport in every format; a figure without data is left out."""
    written = []
    for name, panels_of in DRIFT_FIGURES.items():
        if panels := panels_of(drift):
            written += write_panels([folder / f"{name}.{suffix}" for suffix in formats], panels, inches=DRIFT_INCHES)
    return written


def write_recommendation(folder: Path, found: Recommendation) -> list[Path]:
    """recommendation.json and report.html; each appears whole or not at all."""
    record, page = folder / RECOMMENDATION_FILE, folder / PAGE_FILE
    write_page(page, DecidedResults(recommendations=(found,)))
    clear_leftovers(folder, [record, page])
    # Last: its presence says that the recommendation is finished.
    write_record(record, found)
    return [record, page]


def write_implementation_audit(folder: Path, results: DecidedResults) -> list[Path]:
    """implementation_audit.json and report.html of the one implementation audit in `results`."""
    (audit,) = results.implementation_audits
    written = [audit.write(folder), folder / PAGE_FILE]
    write_page(folder / PAGE_FILE, results)
    clear_leftovers(folder, written)
    return written


def clear_leftovers(folder: Path, written: Sequence[Path]) -> None:
    """Remove the records, pages and figures of earlier results that were not `written` now: nothing of two is mixed."""
    remove_leftovers(folder, written, [f"{name}.{suffix}" for name in FIGURE_NAMES for suffix in FORMATS])


def write_joined(
    folder: Path,
    results: DecidedResults,
    sources: Sequence[Result],
    *,
    figures: bool = False,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """report.html, decisions.json, and with `figures` the figure files; `sources` are the joined results.

    Reproductions alone have no decision map, and no decisions.json.
    """
    page, decisions = folder / PAGE_FILE, folder / DECISIONS_FILE
    write_page(page, results)
    # The last two parts name a result; a whole path would show the folders of someone's machine.
    names = tuple("/".join(result.path.absolute().parts[-2:]) for result in sources)
    written = [page]
    if results.maps:
        write_record(decisions, DecisionMaps(names, results.maps))
        written.append(decisions)
    if figures:
        for name, audit in zip(audit_names(results.audits), results.audits, strict=True):
            place = folder / "figures" / _file_name(name) if len(results.audits) > 1 else folder / "figures"
            written += write_figures(place, audit, formats=formats)
        for drift in results.drifts:
            place = folder / "figures" / _file_name(drift.model) if len(results.drifts) > 1 else folder / "figures"
            written += write_drift_figures(place, drift, formats=formats)
    if folder.absolute() not in {result.path.absolute().parent for result in sources}:
        clear_leftovers(folder, written)
    return written


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "audit"
