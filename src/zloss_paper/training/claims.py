"""Claims about matched methods: rows of a training table against its CE row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN, Claim, Finding, Missing, cell, near, ratio, smaller
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.table import Cell, Key, Row, Table
from zloss_paper.training.table import CE, CENTERED, CENTERED_HEAD, STANDARD

NEAR_CE = 0.1
"""Relative difference within which a tail, gain or gradient norm is at the CE level; the paper gives none."""
LEAST_CHANGE = 0.01
"""Relative change of a tail, gain or gradient norm from which it counts as one; PPL counts as it is."""
COUNTS = f"a change counts from {LEAST_CHANGE:.0%} on"
SMALL_PPL = 0.005
"""Relative difference of PPL that counts as small."""
SAME_PPL = 0.001
"""Relative difference of PPL that counts as unchanged."""
PZ, AP, GRAD, MAX = "P_Z^99.9", "A_p^99", "p99 ‖g‖", "max ‖g‖"
SYMBOLS = {"p_z_999": PZ, "a_p_99": AP, "grad_norm_p99": GRAD, "grad_norm_max": MAX, "ppl": "PPL", "diag_z": "Diag Z"}

Check = Callable[[Table], Finding]
Compare = Callable[[Row, Row], tuple[bool, str]]


def row_of(table: Table, method: str, **key: Key) -> Row:
    """The line of a method, or `Missing`."""
    found = table.find(method=method, **key)
    if not found:
        raise Missing(f"{method} was not measured")
    return found[0]


def judged(check: Callable[[Table], Sequence[tuple[bool, str]]]) -> Check:
    """A check from outcomes: open where a number is missing, failed where one outcome is false."""

    def run(table: Table) -> Finding:
        try:
            outcomes = check(table)
        except Missing as missing:
            return Finding(OPEN, str(missing))
        failed = [sentence for ok, sentence in outcomes if not ok]
        # Two comparisons of the same numbers give the same sentence.
        shown = dict.fromkeys(failed or [sentence for _, sentence in outcomes])
        return Finding(FAILS if failed else HOLDS, "; ".join(shown))

    return run


def against_ce(methods: Sequence[str], *compares: Compare, **key: Key) -> Check:
    """Holds when every comparison of CE with every one of these methods does."""

    def outcomes(table: Table) -> list[tuple[bool, str]]:
        ce = row_of(table, CE)
        return [compare(ce, row_of(table, method, **key)) for method in methods for compare in compares]

    return judged(outcomes)


def _change(first: Row, second: Row, column: str) -> tuple[Cell, Cell, str]:
    a, b = cell(first, column), cell(second, column)
    text = f"{second.key['method']}: {SYMBOLS.get(column, column)} {number(a.value)} → {number(b.value)}"
    return a, b, text


def _falls(a: Cell, b: Cell, column: str) -> bool:
    """Whether b is smaller than a by what counts in this column, given the benefit of rounding."""
    return smaller(b, a) and b.low <= a.high * (1 - _least(column))


def _least(column: str) -> float:
    return 0.0 if column == "ppl" else LEAST_CHANGE


def lower(column: str) -> Compare:
    """The second row's number is smaller."""

    def compare(first: Row, second: Row) -> tuple[bool, str]:
        a, b, text = _change(first, second, column)
        return _falls(a, b, column), text

    return compare


def higher(column: str, factor: float = 1.0) -> Compare:
    """The second row's number is larger, by `factor` at least."""

    def compare(first: Row, second: Row) -> tuple[bool, str]:
        a, b, text = _change(first, second, column)
        return smaller(a, b) and b.high >= a.low * max(factor, 1 + _least(column)), text

    return compare


def near_ce(column: str, tolerance: float = NEAR_CE) -> Compare:
    """The second row's number is within a relative tolerance of the first's."""

    def compare(first: Row, second: Row) -> tuple[bool, str]:
        a, b, text = _change(first, second, column)
        share = ratio(b, a)
        return share.low <= 1 + tolerance and share.high >= 1 - tolerance, text

    return compare


def zero(*columns: str) -> RowCheck:
    """These fractions of a row are 0."""

    def test(row: Row) -> tuple[bool, str]:
        found = {column: cell(row, column).value for column in columns}
        shown = ", ".join(f"{column} {number(value)}" for column, value in found.items())
        return not any(found.values()), f"{row.name()}: {shown}"

    return test


RowCheck = Callable[[Row], tuple[bool, str]]


def all_smallest(column: str, method: str) -> Check:
    """No other row has a smaller number than `method`."""
    symbol = SYMBOLS.get(column, column)

    def outcomes(table: Table) -> list[tuple[bool, str]]:
        own = cell(row_of(table, method), column)
        found = [(row.name(), cell(row, column)) for row in table]
        return [(not _falls(own, other, column), f"{name}: {symbol} {number(other.value)}") for name, other in found]

    return judged(outcomes)


def together(*checks: Check) -> Check:
    """Holds when all do; open where one is open and none fails."""

    def run(table: Table) -> Finding:
        findings = [check(table) for check in checks]
        for verdict in (FAILS, OPEN):
            found = [finding.evidence for finding in findings if finding.verdict == verdict]
            if found:
                return Finding(verdict, "; ".join(found))
        return Finding(HOLDS, "; ".join(finding.evidence for finding in findings))

    return run


def _below_centered_head(table: Table) -> list[tuple[bool, str]]:
    head, own = (cell(row_of(table, method), "p_z_999") for method in (CENTERED_HEAD, CENTERED))
    return [
        (_falls(head, own, "p_z_999"), f"{CENTERED}: {PZ} {number(own.value)}, {CENTERED_HEAD} {number(head.value)}")
    ]


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
    together(all_smallest("a_p_99", CENTERED), against_ce((CENTERED,), lower("p_z_999")), judged(_below_centered_head)),
    COUNTS,
)


def small_ppl_differences(methods: Sequence[str], tolerance: float = SMALL_PPL) -> Claim:
    """Quality moves little against the geometry."""
    return Claim(
        "small_ppl_differences",
        f"The PPL of {' and of '.join(methods)} differs little from that of CE.",
        against_ce(methods, near_ce("ppl", tolerance)),
        f"little: within {tolerance:.1%}",
    )


def quoted(label: str) -> Claim:
    """Every ratio and difference that the text quotes about a table, as one claim about the paper's own setting."""
    rows = list(paper_table("text:quoted_factors").table.find(table=label))

    def outcomes(table: Table) -> list[tuple[bool, str]]:
        if len(table) == 0:
            raise Missing("nothing was measured")
        deviating = next((row for row in table if row.deviations), None)
        if deviating is not None:
            raise Missing("numbers of the paper's own setting, from which these runs deviate")
        return [_quoted(table, row) for row in rows]

    numbers = "; ".join(
        f"{row.key['comparison']} {SYMBOLS[str(row.key['metric'])]} {row.cells['quoted'].value:g}" for row in rows
    )
    return Claim("quoted", f"The factors and differences from CE that the text quotes: {numbers}.", judged(outcomes),
                 "met within 5 % and the rounding of the printed cells")  # fmt: skip


def _quoted(table: Table, row: Row) -> tuple[bool, str]:
    comparison, column = str(row.key["comparison"]).partition(" (")[0], str(row.key["metric"])
    names = [_full_name(name) for name in comparison.split("/")]
    if row.key["kind"] == "ratio":
        a, b = (cell(row_of(table, name), column) for name in names)
        found = ratio(a, b)
    else:
        a, b = cell(row_of(table, names[0]), column), cell(row_of(table, CE), column)
        found = Cell(a.value - b.value, a.half_unit + b.half_unit)
    return near(found, row.cells["quoted"]), f"{row.key['comparison']}: {SYMBOLS[column]} {number(found.value)}"


def _full_name(name: str) -> str:
    return {"CE": CE, "Standard": STANDARD}.get(name, name)
