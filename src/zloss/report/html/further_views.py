"""What the page shows of router scales and reproductions, with the arithmetic that templates must not do."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.reproduction import (
    NOT_COMPARABLE,
    ReproductionTable,
    claims_tally,
    deviations,
    missing_numbers,
    reproduction_table,
)
from zloss.report.tables.router import NamedLine, scale_lines
from zloss.report.tables.router_scale import router_scale_legend
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale
from zloss.results.router_scale import RouterScaleTable


@dataclass(frozen=True)
class RouterScaleView:
    """A coefficient under every convention."""

    table: RouterScaleTable
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class MeasuredView:
    """A measured router scale."""

    scale: MeasuredScale
    title: str
    lines: tuple[NamedLine, ...]


@dataclass(frozen=True)
class ReproductionView:
    """One table or passage of the paper, reproduced."""

    record: ReproductionRecord
    tally: str
    table: ReproductionTable
    not_comparable: str
    remarks: list[str]
    choices: list[tuple[str, str]]


def router_scale_view(table: RouterScaleTable) -> RouterScaleView:
    """The table with its legend."""
    return RouterScaleView(table, router_scale_legend(table))


def measured_view(scale: MeasuredScale) -> MeasuredView:
    """The numbers under their names."""
    return MeasuredView(scale, "Measured from gradients", scale_lines(scale))


def reproduction_view(record: ReproductionRecord) -> ReproductionView:
    """Claims, table, deviations and our choices."""
    compares = bool(record.columns) and not record.comparable
    return ReproductionView(
        record=record,
        tally=claims_tally(record),
        table=reproduction_table(record),
        not_comparable=NOT_COMPARABLE if compares else "",
        remarks=[*(deviations(record) if compares else []), *missing_numbers(record), *record.notes],
        choices=[(choice.setting, choice.ours) for choice in record.not_stated_by_the_paper],
    )
