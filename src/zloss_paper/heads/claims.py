"""Claims that the raw/centered tables share: what centering keeps, removes and may raise."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import number
from zloss_paper.engine.checks import Tested, all_pairs, for_models, some_pair
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.comparison import QUOTED_TOLERANCE, cell
from zloss_paper.engine.table import Pair
from zloss_paper.heads.pair_tests import SYMBOLS, change, falls_by, rises

PPL_TOLERANCE = 1e-4
SHIFT_LEFT = 1e-4


def _same_ppl(pair: Pair) -> Tested:
    raw, centered = cell(pair.raw, "ppl"), cell(pair.centered, "ppl")
    gap = abs(raw.value - centered.value) / raw.value
    return gap <= PPL_TOLERANCE, f"{change(pair, 'ppl')}, relative difference {number(gap, 2)}"


def _shift_gone(pair: Pair) -> Tested:
    raw, centered = cell(pair.raw, "mu_abs_99"), cell(pair.centered, "mu_abs_99")
    return centered.low <= SHIFT_LEFT * raw.high, change(pair, "mu_abs_99")


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
    """The gain tail of some head rises; in the paper these are the heads of `shown_by`."""
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
