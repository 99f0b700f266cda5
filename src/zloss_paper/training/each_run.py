"""What every single run of a line gave, for claims that a mean over seeds cannot decide.

The numbers are those of `details.runs` in the result file, so a kept result is judged again without its runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, judged
from zloss_paper.engine.claim import Check, Claim
from zloss_paper.engine.comparison import Missing
from zloss_paper.engine.paper_methods import CE, RAW_METHODS
from zloss_paper.engine.paper_table import PaperTable
from zloss_paper.engine.table import Line, Table
from zloss_paper.training.against_ce import SYMBOLS, line_of

QUANTITIES = ("ppl", "nonfinite_gradient", "nonfinite_microbatch", "adam_d_ratio_p99")
"""What claims read of each run."""
NAMES = {
    "nonfinite_gradient": "steps with a nonfinite gradient",
    "nonfinite_microbatch": "nonfinite micro-batches",
    "adam_d_ratio_p99": "p99 ‖d‖₂/‖θ‖₂",
}
STATED = {"nonfinite_gradient": "nonfinite_gradient_events", "nonfinite_microbatch": "nonfinite_microbatch_events"}
"""Quantities that the paper states of all runs of a table, by their name in its settings."""


def with_each_run(table: Table, details: Mapping[str, Any]) -> Table:
    """The lines with the numbers of their runs, which `details` has line by line, seed by seed."""
    records = details.get("runs", ())
    if not table.lines or not records or len(records) % len(table):
        return table
    seeds = len(records) // len(table)
    return Table(
        tuple(
            replace(line, by_seed=_numbers(records[start : start + seeds], line))
            for start, line in zip(range(0, len(records), seeds), table, strict=True)
        )
    )


def _numbers(records: Sequence[Mapping[str, Any]], line: Line) -> dict[str, tuple[float, ...]]:
    # Where a mean does not exist because a run diverged, the runs' own numbers are not used either.
    return {
        name: tuple(float(record[name]) for record in records)
        for name in QUANTITIES
        if name not in line.reasons and all(record.get(name) is not None for record in records)
    }


def with_stated_events(paper: PaperTable) -> PaperTable:
    """The paper's lines with what it states of every run of the table: how many events were not finite."""
    stated = {name: paper.config[key] for name, key in STATED.items() if paper.config.get(key) is not None}
    runs = int(paper.config.get("seeds_count") or 1)
    by_seed = {name: (float(value),) * runs for name, value in stated.items()}
    return replace(paper, table=Table(tuple(replace(line, by_seed=by_seed) for line in paper.table)))


def of_each_run(line: Line, quantity: str) -> tuple[float, ...]:
    """The number of every run, or `Missing`."""
    if quantity not in line.by_seed:
        name = NAMES.get(quantity, SYMBOLS.get(quantity, quantity))
        raise Missing(f"{line.name()}: {name} of each run not measured in this run")
    return line.by_seed[quantity]


def below_ce_in_every_run(method: str, quantity: str) -> Check:
    """Holds when the method's number is below that of CE at every seed."""

    def tests(table: Table) -> list[Tested]:
        ce, own = (of_each_run(line_of(table, name), quantity) for name in (CE, method))
        symbol = SYMBOLS.get(quantity, quantity)
        return [
            (b < a, f"{method}, run {run}: {symbol} {number(a, 6)} → {number(b, 6)}")
            for run, (a, b) in enumerate(zip(ce, own, strict=True), 1)
        ]

    return judged(tests)


def all_finite(statement: str, *quantities: str) -> Claim:
    """The paper's statement that these events did not occur in any run of the table."""

    def tests(table: Table) -> list[Tested]:
        for method in RAW_METHODS:
            line_of(table, method)  # without them the stress was not run
        # One sentence per quantity where no run has an event: a table has up to 26 runs.
        tested = []
        for quantity in quantities:
            found = [(line, value) for line in table for value in of_each_run(line, quantity)]
            events = [(line, value) for line, value in found if value]
            tested += [(False, f"{line.name()}: {NAMES[quantity]} {number(value)}") for line, value in events]
            if found and not events:
                tested.append((True, f"{NAMES[quantity]}: none in {len(found)} runs"))
        return tested

    return Claim("all_finite", statement, judged(tests, none="no run was measured"))
