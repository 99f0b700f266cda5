"""Claims that the raw/centered tables share: what centering keeps, removes and may raise."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.claim import (
    QUOTED_TOLERANCE,
    Claim,
    PairTest,
    all_pairs,
    cell,
    change,
    for_models,
    near,
    ratio,
    smaller,
    some_pair,
)
from zloss_paper.engine.table import Cell, Pair

SYMBOLS = {
    "ppl": "PPL",
    "diag_z": "Diag Z",
    "p_z_999": "P_Z^99.9",
    "a_p_99": "A_p^99",
    "mu_abs_99": "p99 |μ|",
    "sigma_1": "σ_1",
}
PPL_TOLERANCE = 1e-4
SHIFT_LEFT = 1e-4


def rises(column: str) -> PairTest:
    """Centering raises the number."""

    def test(pair: Pair) -> tuple[bool, str]:
        raw, centered = cell(pair.raw, column), cell(pair.centered, column)
        return smaller(raw, centered), change(pair, column, SYMBOLS[column])

    return test


def falls(column: str, *, factor: float = 1.0) -> PairTest:
    """Centering lowers the number, by at least `factor`."""

    def test(pair: Pair) -> tuple[bool, str]:
        raw, centered = cell(pair.raw, column), cell(pair.centered, column)
        ok = smaller(centered, raw) and raw.high >= factor * centered.low
        return ok, change(pair, column, SYMBOLS[column])

    return test


def both(*tests: PairTest) -> PairTest:
    """Every test; its sentence tells all of them."""

    def test(pair: Pair) -> tuple[bool, str]:
        outcomes = [one(pair) for one in tests]
        rest = [sentence.partition(": ")[2] for _, sentence in outcomes[1:]]
        return all(ok for ok, _ in outcomes), ", ".join([outcomes[0][1], *rest])

    return test


def falls_by(column: str, quoted: float, half_unit: float) -> PairTest:
    """Centering divides the number by the quoted factor."""

    def test(pair: Pair) -> tuple[bool, str]:
        found = ratio(cell(pair.raw, column), cell(pair.centered, column))
        sentence = f"{change(pair, column, SYMBOLS[column])}, a factor of {number(found.value)}"
        return near(found, Cell(quoted, half_unit)), sentence

    return test


def goes_from_to(column: str, raw: Cell, centered: Cell) -> PairTest:
    """The number has the quoted values."""

    def test(pair: Pair) -> tuple[bool, str]:
        ok = near(cell(pair.raw, column), raw) and near(cell(pair.centered, column), centered)
        return ok, change(pair, column, SYMBOLS[column])

    return test


def _same_ppl(pair: Pair) -> tuple[bool, str]:
    raw, centered = cell(pair.raw, "ppl"), cell(pair.centered, "ppl")
    gap = abs(raw.value - centered.value) / raw.value
    return gap <= PPL_TOLERANCE, f"{change(pair, 'ppl', 'PPL')}, relative difference {number(gap, 2)}"


def _shift_gone(pair: Pair) -> tuple[bool, str]:
    raw, centered = cell(pair.raw, "mu_abs_99"), cell(pair.centered, "mu_abs_99")
    return centered.low <= SHIFT_LEFT * raw.high, change(pair, "mu_abs_99", SYMBOLS["mu_abs_99"])


PPL_PRESERVED = Claim(
    "ppl_preserved",
    "Centering leaves the perplexity of every model as it is.",
    all_pairs(_same_ppl),
    f"equal within {PPL_TOLERANCE:g} relative",
)
SHIFT_REMOVED = Claim(
    "shift_removed",
    "Centering removes the common-shift tail of every model, up to rounding.",
    all_pairs(_shift_gone),
    f"at most {SHIFT_LEFT:g} of the raw tail is left",
)


def not_uniform(shown_by: Sequence[str]) -> Claim:
    """Some head's gain tail rises; in the paper that of `shown_by`."""
    return Claim(
        "gain_may_rise",
        "Centering is not uniformly beneficial: there are heads whose gain tail A_p^99 it raises.",
        some_pair(rises("a_p_99"), shown_by=shown_by),
    )


def gain_rises(models: Sequence[str], id: str, statement: str) -> Claim:
    """Centering raises A_p^99 for the named models."""
    return Claim(id, statement, for_models(models, rises("a_p_99")))


def quoted_factor(model: str, column: str, quoted: float) -> Claim:
    """Centering divides a tail of one model by a factor the paper quotes to one decimal."""
    return Claim(
        f"{column}_factor_{model.lower().replace(' ', '_')}",
        f"Centering lowers {SYMBOLS[column]} of {model} by a factor of {quoted:g}.",
        for_models((model,), falls_by(column, quoted, 0.05), exact=True),
        f"within {QUOTED_TOLERANCE:.0%} of the quoted factor",
    )
