"""Claims about raw/centered pairs: what centering keeps, removes and may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zloss.report.numbers import number
from zloss_paper.engine.claims import (
    QUOTED_TOLERANCE,
    Claim,
    PairTest,
    Tested,
    all_pairs,
    cell,
    for_models,
    near,
    ratio,
    smaller,
    some_pair,
)
from zloss_paper.engine.table import Cell, Pair

PPL_TOLERANCE = 1e-4
SHIFT_LEFT = 1e-4
SYMBOLS = {
    "ppl": "PPL",
    "diag_z": "Diag Z",
    "p_z_999": "P_Z^99.9",
    "a_p_99": "A_p^99",
    "mu_abs_99": "p99 |μ|",
    "sigma_1": "σ_1",
}


def pair_test(column: str, holds: Callable[[Cell, Cell], bool]) -> PairTest:
    """`holds` of the raw and the centered number: "GPT-2: P_Z^99.9 263.5 → 20.61"."""

    def test(pair: Pair) -> Tested:
        raw, centered = cell(pair.raw, column), cell(pair.centered, column)
        return holds(raw, centered), f"{pair.name}: {SYMBOLS[column]} {number(raw.value)} → {number(centered.value)}"

    return test


def rises(column: str) -> PairTest:
    """Centering raises the number."""
    return pair_test(column, smaller)


def falls(column: str, *, factor: float = 1.0) -> PairTest:
    """Centering lowers the number, by at least `factor`."""
    return pair_test(column, lambda raw, centered: smaller(centered, raw) and raw.high >= factor * centered.low)


def goes_from_to(column: str, raw: Cell, centered: Cell) -> PairTest:
    """The number has the quoted values."""
    return pair_test(column, lambda found, after: near(found, raw) and near(after, centered))


def raw_test(column: str, holds: Callable[[Cell], bool]) -> PairTest:
    """`holds` of the raw number."""

    def test(pair: Pair) -> Tested:
        found = cell(pair.raw, column)
        return holds(found), f"{pair.name}: {column} {number(found.value)}"

    return test


def in_range(column: str, low: float, high: float) -> PairTest:
    """The raw number lies between two bounds, within the rounding of its cell."""
    return raw_test(column, lambda found: found.high >= low and found.low <= high)


def quoted(column: str, value: float, half_unit: float) -> PairTest:
    """The raw number is the quoted one."""
    return raw_test(column, lambda found: near(found, Cell(value, half_unit)))


def both(*tests: PairTest) -> PairTest:
    """Both tests; the sentence has the numbers of both."""

    def test(pair: Pair) -> Tested:
        tested = [one(pair) for one in tests]
        rest = [sentence.partition(": ")[2] for _, sentence in tested[1:]]
        return all(ok for ok, _ in tested), ", ".join([tested[0][1], *rest])

    return test


def _same_ppl(pair: Pair) -> Tested:
    raw, centered = cell(pair.raw, "ppl"), cell(pair.centered, "ppl")
    gap = abs(raw.value - centered.value) / raw.value
    _, change = rises("ppl")(pair)
    return gap <= PPL_TOLERANCE, f"{change}, relative difference {number(gap, 2)}"


PPL_PRESERVED = Claim(
    "ppl_preserved",
    "Centering leaves the perplexity of every model as it is.",
    all_pairs(_same_ppl),
    f"equal within {PPL_TOLERANCE:g} relative",
)
SHIFT_REMOVED = Claim(
    "shift_removed",
    "Centering removes the common-shift tail of every model, up to rounding.",
    all_pairs(pair_test("mu_abs_99", lambda raw, centered: centered.low <= SHIFT_LEFT * raw.high)),
    f"at most {SHIFT_LEFT:g} of the raw tail is left",
)


def not_uniform(*shown_by: str) -> Claim:
    """The gain tail of some head rises; in the paper these are the heads of `shown_by`."""
    return Claim(
        "gain_may_rise",
        "Centering is not uniformly beneficial: there are heads whose gain tail A_p^99 it raises.",
        some_pair(rises("a_p_99"), shown_by=shown_by),
    )


def gain_rises(models: Sequence[str], id: str, statement: str) -> Claim:
    """Centering raises A_p^99 for the named models."""
    return Claim(id, statement, for_models(models, rises("a_p_99")))


def quoted_factor(model: str, column: str, factor: float) -> Claim:
    """Centering divides a tail of one model by a factor the paper quotes to one decimal."""

    def test(pair: Pair) -> Tested:
        found = ratio(cell(pair.raw, column), cell(pair.centered, column))
        _, change = rises(column)(pair)
        return near(found, Cell(factor, 0.05)), f"{change}, a factor of {number(found.value)}"

    return Claim(
        f"{column}_factor_{model.lower().replace(' ', '_')}",
        f"Centering lowers {SYMBOLS[column]} of {model} by a factor of {factor:g}.",
        for_models((model,), test, exact=True),
        f"within {QUOTED_TOLERANCE:.0%} of the quoted factor",
    )
