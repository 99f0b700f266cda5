"""What one watched number did over the run: the largest change while CE stood still, and where it began.

From checkpoint i to j the number q has moved if

    |q_j − q_i| − h_ij  >  max(least change, least ratio · min(|q_i|, |q_j|))

h_ij is half the width of the 95 % interval of the change over the text. The movement is "invisible" where CE stayed within
its tolerance from i to every checkpoint up to j, and "with_ce" where q moved only over stretches in which CE moved too.
It began at the first k after i at which q had moved from its value at i.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zloss.decide.drift.ce_changes import CrossEntropies
from zloss.decide.drift.limits import DriftLimits
from zloss.decide.drift.watched import SHIFT_KEYS, Watched
from zloss.decide.drift.watched_values import WatchedValues
from zloss.results.drift import CeChange, Movement
from zloss.results.quantities import symbol


@dataclass(frozen=True)
class MovementRule:
    """The test of one number."""

    watched: Watched
    values: WatchedValues
    limits: DriftLimits

    def moved(self, i: int, j: int) -> float | None:
        """|q_j − q_i| where q has moved from i to j, else None."""
        change = self.values.change(i, j)
        if change is None:
            return None
        size, noise = abs(change[0]), change[1]
        before, after = self.values.tested_I[i], self.values.tested_I[j]
        assert before is not None
        assert after is not None
        share = self.limits.least_ratio * min(abs(before), abs(after))
        return size if size - noise > max(self.watched.least_change(self.limits), share) else None

    def largest(self, pairs: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """The pair with the largest movement; None where q moved over none of them."""
        sizes = {pair: size for pair in pairs if (size := self.moved(*pair)) is not None}
        return max(sizes, key=lambda pair: sizes[pair], default=None)

    def began(self, i: int, j: int) -> int:
        """The first checkpoint after i, up to j, at which q had moved from its value at i."""
        return next(k for k in range(i + 1, j + 1) if self.moved(i, k) is not None)


def judge_movement(
    watched: Watched, values: WatchedValues, ce: CrossEntropies, reach: Sequence[int], limits: DriftLimits
) -> Movement:
    """The judgement on one number; `reach` is that of the cross-entropies."""
    rule = MovementRule(watched, values, limits)
    name = said(watched)
    if all(value is None for value in values.shown_I):
        return Movement(watched.key, watched.coordinate, "open", f"{name} was not measured.")
    if all(value is None for value in values.tested_I):
        return Movement(watched.key, watched.coordinate, "open", f"The noise of {name} on this text is unknown.")
    last = len(reach) - 1
    pair = rule.largest((i, j) for i, end in enumerate(reach) for j in range(i + 1, end + 1))
    invisible = pair is not None
    pair = pair or rule.largest((i, j) for i in range(last) for j in range(i + 1, last + 1))
    if pair is None:
        return Movement(watched.key, watched.coordinate, "quiet", f"{name} did not move.", level=values.level)
    i, j = pair
    k, change = rule.began(i, j), values.change(i, j)
    assert change is not None
    ce_change = ce.change(i, j)
    before, after = values.shown_I[i], values.shown_I[j]
    return Movement(
        quantity=watched.key,
        coordinate=watched.coordinate,
        state="invisible" if invisible else "with_ce",
        reason=f"{name} {verb(before, after)} between steps {ce.steps[i]} and {ce.steps[j]} while {ce_said(ce_change)}; "
        f"it began between steps {ce.steps[k - 1]} and {ce.steps[k]}.",
        from_step=ce.steps[i],
        to_step=ce.steps[j],
        before=before,
        after=after,
        last_before=ce.steps[k - 1],
        began=ce.steps[k],
        noise=None if values.spread_IR is None else change[1],
        level=values.level,
        ce_change=ce_change,
    )


def said(watched: Watched) -> str:
    """The number in a sentence; μ exists in one coordinate only."""
    where = "" if watched.key in SHIFT_KEYS else f"{watched.coordinate} "
    return f"{where}{symbol(watched.key)}"


def verb(before: float | None, after: float | None) -> str:
    """ "rose from 1 to 2"."""
    if before is None or after is None:
        return "changed"
    return f"{'rose' if after > before else 'fell'} from {before:.4g} to {after:.4g}"


def ce_said(change: CeChange) -> str:
    """What CE did meanwhile."""
    if change.difference is None:
        return "CE was not finite"
    interval = "" if change.half_width is None else f" ± {change.half_width:.2g}"
    # Below 1e-5 nat a difference is rounding of the forward pass.
    small = abs(change.difference) < 1e-5 and (change.half_width or 0) < 1e-5
    size = "less than 1e-5 nat" if small else f"{change.difference:+.2g}{interval} nat"
    return f"CE {'stood still' if change.still else 'moved'} ({size})"
