"""Claims about matched methods: the line of a method against the CE line of its table, or every run against its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zloss.report.numbers import number
from zloss_paper.engine.claims import (
    EVERYTHING,
    SYMBOLS,
    Check,
    Claim,
    Compare,
    LineTest,
    Missing,
    Tested,
    cell,
    change,
    line_test,
    near,
    ratio,
    rises,
    smaller,
    together,
    within,
)
from zloss_paper.engine.inputs import CE, CENTERED, CENTERED_HEAD, RAW_METHODS, STANDARD
from zloss_paper.engine.table import Cell, Key, Line, Table, paper_table

NEAR_CE = 0.1
"""Relative difference within which a tail, gain or gradient norm is at the CE level; the paper gives none."""
LEAST_CHANGE = 0.01
"""Smallest relative change of a tail, gain or gradient norm that counts as a change; every difference of PPL counts."""
COUNTS = f"a change counts from {LEAST_CHANGE:.0%} on"
SMALL_PPL = 0.005
"""Relative difference of PPL that counts as small."""
SAME_PPL = 0.001
"""Relative difference of PPL that counts as unchanged."""
EACH_RUN = {
    "nonfinite_gradient": "steps with a nonfinite gradient",
    "nonfinite_microbatch": "nonfinite micro-batches",
    "adam_d_ratio_p99": "p99 ‖d‖₂/‖θ‖₂",
}
"""Quantities of single runs, in words."""
OTHER_SETTING = "numbers of the paper's own setting, from which these runs deviate"


def line_of(table: Table, method: str, **key: Key) -> Line:
    """The line of a method, or `Missing`."""
    found = table.find(method=method, **key)
    if not found:
        raise Missing(f"{method} was not measured")
    return found[0]


def of_methods(methods: Iterable[str], test: LineTest, **key: Key) -> Check:
    """The test of the line of every one of these methods."""
    return lambda table: [test(line_of(table, method, **key)) for method in methods]


def against_ce(methods: Sequence[str], *compares: Compare, **key: Key) -> Check:
    """Every comparison of CE with every one of these methods."""

    def tests(table: Table) -> list[Tested]:
        ce = line_of(table, CE)
        return [compare(method, ce, line_of(table, method, **key)) for method in methods for compare in compares]

    return tests


def lower(column: str) -> Compare:
    """The second line's number is smaller, by at least what counts in this column."""
    return change(column, lambda a, b: counts_as_lower(a, b, column))


def higher(column: str, factor: float = 1.0) -> Compare:
    """The second line's number is larger, by `factor` and by what counts in this column at least."""
    return rises(column, max(factor, 1 + _least(column)))


def near_ce(column: str, tolerance: float = NEAR_CE) -> Compare:
    """The second line's number is within a relative tolerance of the first's."""
    return change(column, lambda a, b: within(ratio(b, a), tolerance))


def counts_as_lower(a: Cell, b: Cell, column: str) -> bool:
    """Whether b may be smaller than a, within the rounding of both, by at least what counts in this column."""
    return smaller(b, a) and b.low <= a.high * (1 - _least(column))


def _least(column: str) -> float:
    return 0.0 if column == "ppl" else LEAST_CHANGE


def zero(*columns: str) -> LineTest:
    """These fractions of a line are 0."""
    return line_test(dict(zip(columns, columns, strict=True)), lambda *found: not any(one.value for one in found))


def all_smallest(column: str, method: str) -> Check:
    """No other line has a smaller number than that of `method`."""
    symbol = SYMBOLS.get(column, column)

    def tests(table: Table) -> list[Tested]:
        own = cell(line_of(table, method), column)
        found = [(line.name(), cell(line, column)) for line in table]
        return [
            (not counts_as_lower(own, other, column), f"{name}: {symbol} {number(other.value)}")
            for name, other in found
        ]

    return tests


def of_each_run(line: Line, quantity: str) -> tuple[float, ...]:
    """The number of every run, or `Missing`."""
    if quantity not in line.by_seed:
        name = EACH_RUN.get(quantity, SYMBOLS.get(quantity, quantity))
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

    return tests


def all_finite(statement: str, quantities: Sequence[str] = ("nonfinite_gradient", "nonfinite_microbatch")) -> Claim:
    """The paper's statement that these events did not occur in any run of the table."""

    def tests(table: Table) -> list[Tested]:
        for method in RAW_METHODS:
            line_of(table, method)  # without them the stress was not run
        # One sentence per quantity where no run has an event: a table has up to 26 runs.
        tested = []
        for quantity in quantities:
            found = [(line, value) for line in table for value in of_each_run(line, quantity)]
            events = [(line, value) for line, value in found if value]
            tested += [(False, f"{line.name()}: {EACH_RUN[quantity]} {number(value)}") for line, value in events]
            if found and not events:
                tested.append((True, f"{EACH_RUN[quantity]}: none in {len(found)} runs"))
        return tested

    return Claim("all_finite", statement, tests)


def small_ppl_differences(*methods: str) -> Claim:
    """The PPL of these methods is close to that of CE."""
    return Claim(
        "small_ppl_differences",
        f"The PPL of {' and of '.join(methods)} differs little from that of CE.",
        against_ce(methods, near_ce("ppl", SMALL_PPL)),
        f"little: within {SMALL_PPL:.1%}",
    )


def quoted(label: str) -> Claim:
    """One claim for every number that the text quotes about a table; it needs the paper's own setting."""
    lines = list(paper_table("text:quoted_factors").table.find(table=label))

    def tests(table: Table) -> list[Tested]:
        at_the_papers_setting(table)
        return [_quoted(table, line) for line in lines]

    numbers = "; ".join(
        f"{line.key['comparison']} {SYMBOLS[str(line.key['metric'])]} {line.cells['quoted'].value:g}" for line in lines
    )
    return Claim(
        "quoted",
        f"The factors and differences from CE that the text quotes: {numbers}.",
        tests,
        "met within 5 % and the rounding of the printed cells",
        EVERYTHING,
    )


def at_the_papers_setting(table: Table) -> None:
    """`Missing` where nothing was measured, or a line deviates from the paper's own setting."""
    if len(table) == 0:
        raise Missing("nothing was measured")
    if any(line.deviations for line in table):
        raise Missing(OTHER_SETTING)


def _quoted(table: Table, line: Line) -> Tested:
    comparison, column = str(line.key["comparison"]).partition(" (")[0], str(line.key["metric"])
    names = [{"CE": CE, "Standard": STANDARD}.get(name, name) for name in comparison.split("/")]
    if line.key["kind"] == "ratio":
        a, b = (cell(line_of(table, name), column) for name in names)
        found = ratio(a, b)
    else:
        a, b = cell(line_of(table, names[0]), column), cell(line_of(table, CE), column)
        found = Cell(a.value - b.value, a.half_unit + b.half_unit)
    return near(found, line.cells["quoted"]), f"{line.key['comparison']}: {SYMBOLS[column]} {number(found.value)}"


def _below_centered_head(table: Table) -> list[Tested]:
    head, own = (cell(line_of(table, method), "p_z_999") for method in (CENTERED_HEAD, CENTERED))
    shown = f"{CENTERED}: {SYMBOLS['p_z_999']} {number(own.value)}, {CENTERED_HEAD} {number(head.value)}"
    return [(counts_as_lower(head, own, "p_z_999"), shown)]


STANDARD_TAIL = Claim(
    "standard_lowers_tail",
    "Standard Z-loss lowers the log-normalizer tail of CE.",
    against_ce((STANDARD,), lower("p_z_999")),
    COUNTS,
)
STANDARD_KEEPS_GAIN = Claim(
    "standard_keeps_gain",
    "Standard Z-loss leaves the gain tail at the CE level.",
    against_ce((STANDARD,), near_ce("a_p_99")),
    f"at the level: within {NEAR_CE:.0%}",
)
HEAD_LOWERS_BOTH = Claim(
    "centered_head_lowers_both",
    "Deploying the centered head lowers the log-normalizer tail and the gain tail without any auxiliary loss.",
    against_ce((CENTERED_HEAD,), lower("p_z_999"), lower("a_p_99")),
    COUNTS,
)
HEAD_KEEPS_PPL = Claim(
    "centered_head_keeps_ppl",
    "Centered head deployment preserves the PPL of CE.",
    against_ce((CENTERED_HEAD,), near_ce("ppl", SAME_PPL)),
    f"preserved: within {SAME_PPL:.1%}",
)
CENTERED_JOINT = Claim(
    "centered_joint",
    "Centered Z-loss gives the strongest joint reduction: no method has a smaller gain tail, and its log-normalizer tail is "
    "below those of CE and the centered head.",
    together(all_smallest("a_p_99", CENTERED), against_ce((CENTERED,), lower("p_z_999")), _below_centered_head),
    COUNTS,
)
RAW_IMPROVE = Claim(
    "raw_improve_ppl_and_tail",
    "Standard, Factorized and Gain-aware Z-loss improve PPL over CE and lower the log-normalizer tail.",
    against_ce(RAW_METHODS, lower("ppl"), lower("p_z_999")),
    COUNTS,
)
