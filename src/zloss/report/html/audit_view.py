"""What the page shows of the audit of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.svg import Drawing, drawings
from zloss.report.charts.tails import tail_panels
from zloss.report.html.cards import Card, cards
from zloss.report.tables.head import HeadLine, head_lines
from zloss.report.tables.plain import Lines, flat_lines
from zloss.report.tables.router import RouterView, router_view
from zloss.report.tables.verdicts import tally
from zloss.report.text.summary import summarize
from zloss.results.audit import AuditReport
from zloss.results.figure_data import ExtremeTable
from zloss.results.record import to_plain

EXTREME_TITLES = {
    ("violation", "raw"): "|log Z − c|, raw",
    ("violation", "centered"): "|log Z̃ − c|, centered",
    ("gain", "raw"): "A_p, raw",
    ("gain", "centered"): "A_p, centered",
    ("shift", "raw"): "|μ|",
    ("delta_u", "raw"): "‖δ_u‖, raw",
    ("delta_u", "centered"): "‖δ_u‖, centered",
}


@dataclass(frozen=True)
class AuditView:
    """What the template shows of one audit."""

    report: AuditReport
    name: str
    key: str
    """Prefix of its element ids."""
    summary: list[str]
    tally: str
    cards: list[Card]
    geometry: list[Drawing]
    tails: list[Drawing]
    spectrum: list[Drawing]
    head_lines: list[HeadLine]
    extremes: list[tuple[str, ExtremeTable]]
    model_lines: Lines
    corpus_lines: Lines
    provenance_lines: Lines
    router: RouterView | None
    models: str | None = None
    """Which of several joined results is of which model; None where all are of this one."""


def audit_view(report: AuditReport, name: str, key: str, *, models: str | None = None) -> AuditView:
    """The view of one audit; `key` is the prefix of its element ids."""
    return AuditView(
        report=report,
        name=name,
        key=key,
        summary=summarize(report),
        tally=tally(report.decisions),
        cards=cards(report),
        geometry=drawings(geometry_panels(report), key),
        tails=drawings(tail_panels(report), key),
        spectrum=drawings(spectrum_panels(report), key),
        head_lines=head_lines(report),
        extremes=[(_extreme_title(table), table) for table in report.extreme_tokens if table.tokens],
        model_lines=flat_lines(to_plain(report.model)),
        corpus_lines=flat_lines(to_plain(report.corpus)),
        provenance_lines=flat_lines(to_plain(report.provenance)),
        router=None if report.router is None else router_view(report.router),
        models=models,
    )


def _extreme_title(table: ExtremeTable) -> str:
    return EXTREME_TITLES.get((table.quantity, table.coordinate), f"{table.quantity}, {table.coordinate}")
