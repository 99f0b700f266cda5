"""What the page shows of a reproduction, with the arithmetic that templates must not do."""

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
from zloss.results.reproduction import ReproductionRecord


@dataclass(frozen=True)
class ReproductionView:
    """One table or passage of the paper, reproduced."""

    record: ReproductionRecord
    tally: str
    table: ReproductionTable
    not_comparable: str
    remarks: list[str]
    choices: list[tuple[str, str]]


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
