"""What moved between the checkpoints of a run, when it began, and whether the loss curve shows it.

Axes: I checkpoints, R resamples of the text, B blocks, G groups of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zloss.decide.intervals import (
    LEAST_GROUPS,
    block_values,
    judged_level,
    quality_interval,
    resampled,
    student_quantile,
    text_resamples,
)
from zloss.errors import InputError
from zloss.results.drift import CeChange, Drift, KeptCheckpoint, Movement
from zloss.results.options import Coordinate, check_numbers
from zloss.results.provenance import Provenance
from zloss.results.quantities import symbol
from zloss.results.run_metrics import GAIN, SHIFT, SHIFT_SQUARED, VIOLATION

Floats = NDArray[np.float64]
LEAST_CHECKPOINTS = 2


@dataclass(frozen=True)
class DriftLimits:
    """When a number of a head counts as moved, and when cross-entropy counts as still.

    The paper does not compare checkpoints of one run: these limits are ours, each with its reason.
    """

    ppl_tolerance: float = 0.01
    """CE is still between two checkpoints when the 95 % interval of its paired change stays within this share of PPL: the
    tolerance of the quality gate."""
    least_ratio: float = 0.1
    """A number moves only when it changes by more than this share of the smaller of its two values, its noise over the text
    subtracted."""
    least_nats: float = 1.0
    """p99 |μ|, rms μ and P_Z^99.9 move only when they change by more than this, in nats: at λ = 1e-4 a violation of one nat
    adds 1e-4 nat to the loss."""
    least_gain: float = 1.0
    """A_p^99 moves only when it changes by more than this: a tenth of the gain at which the transport stage fires."""
    least_r_z: float = 0.005
    """R_Z moves only when it changes by more than this: a tenth of the R_Z budget."""
    least_share: float = 0.01
    """E_1 moves only when it changes by more than this share of the head's energy."""

    def __post_init__(self) -> None:
        check_numbers(self, [field.name for field in fields(self)])

    @property
    def ce_tolerance(self) -> float:
        """`ppl_tolerance` in nats of CE: log(1 + share)."""
        return math.log1p(self.ppl_tolerance)

    def to_dict(self) -> dict[str, float]:
        """Name → value, as drift.json stores them."""
        return dict(asdict(self))


@dataclass(frozen=True)
class Watched:
    """One number of `DriftNumbers` in one coordinate."""

    key: str
    coordinate: Coordinate
    limit: str | None
    """Name of its smallest change among `DriftLimits`; None for the ratio alone."""
    tail: str | None = None
    """The token quantity whose quantile it is."""
    quantile: float | None = None
    """That quantile."""
    mean: str | None = None
    """The token quantity of whose mean it is the square root. A number with neither does not depend on tokens, or is not
    known block by block: its noise over the text is taken as 0."""

    def least_change(self, limits: DriftLimits) -> float:
        """The absolute part of the limit."""
        return 0.0 if self.limit is None else float(getattr(limits, self.limit))


def _both(key: str, limit: str | None, tail: str | None = None, quantile: float | None = None) -> tuple[Watched, ...]:
    coordinates: tuple[Coordinate, ...] = ("raw", "centered")
    return tuple(
        Watched(key, coordinate, limit, None if tail is None else f"{tail}.{coordinate}", quantile)
        for coordinate in coordinates
    )


WATCHED: tuple[Watched, ...] = (
    # A centered μ is rounding noise.
    Watched("mu_abs_99", "raw", "least_nats", tail=f"{SHIFT}.raw", quantile=0.99),
    Watched("mu_rms", "raw", "least_nats", mean=f"{SHIFT_SQUARED}.raw"),
    *_both("p_z_999", "least_nats", VIOLATION, 0.999),
    *_both("a_p_99", "least_gain", GAIN, 0.99),
    *_both("sigma_1", None),
    *_both("e_1", "least_share"),
    *_both("r_z", "least_r_z"),
)
"""In the order of the findings: the common shift first, because the raw numbers after it follow it."""
SHIFT_KEYS = ("mu_abs_99", "mu_rms")
"""Numbers of the common shift. They exist in raw logits only: centered, they are rounding noise."""


def evaluate_drift(
    kept: Sequence[KeptCheckpoint], limits: DriftLimits | None = None, *, model: str, provenance: Provenance
) -> Drift:
    """The record of a run from its finished checkpoints, given in the order of their steps; `model` is its name."""
    limits = limits or DriftLimits()
    if len(kept) < LEAST_CHECKPOINTS:
        raise InputError(f"`checkpoints` is expected to name at least two checkpoints, but got {len(kept)}.")
    first = kept[0]
    if any(each.tokens != first.tokens or each.blocks.tokens != first.blocks.tokens for each in kept):
        raise InputError("`checkpoints` are expected to be measured on the same tokens, but their blocks differ.")
    last_still = [_last_still(kept, i, limits) for i in range(len(kept))]
    movements = tuple(_movement(_watched_values(watched, kept), kept, last_still, limits) for watched in WATCHED)
    return Drift(
        model=model,
        corpus=first.corpus,
        blocks=len(first.blocks.tokens),
        block_size=max(first.blocks.tokens),
        checkpoints=tuple(each.checkpoint for each in kept),
        ce_changes=tuple(_ce_change(before, after, limits) for before, after in pairwise(kept)),
        movements=movements,
        finding=_finding(movements, ce_stood_still=any(j > i for i, j in enumerate(last_still))),
        began=next((movement.began for movement in movements if movement.state == "invisible"), None),
        limits=limits.to_dict(),
        notes=first.notes,
        provenance=provenance,
    )


# Cross-entropy


def _ce_change(before: KeptCheckpoint, after: KeptCheckpoint, limits: DriftLimits) -> CeChange:
    """The paired change of CE between two checkpoints on the same blocks.

    Δ = mean over tokens of CE_after − CE_before; h = t·(standard error of Δ over G contiguous groups of blocks). CE is still
    if |Δ| + h is within the tolerance.
    """
    steps = before.checkpoint.step, after.checkpoint.step
    if None in before.blocks.ce + after.blocks.ce:
        return CeChange(*steps, None, None, still=False)
    interval = quality_interval([(before.blocks, after.blocks)])
    # One run has no spread over seeds: the interval is that of the text alone.
    half = interval.group_part
    still = interval.groups >= LEAST_GROUPS and abs(interval.difference) + half <= limits.ce_tolerance
    return CeChange(*steps, interval.difference, half if math.isfinite(half) else None, still)


def _last_still(kept: Sequence[KeptCheckpoint], i: int, limits: DriftLimits) -> int:
    """The last checkpoint j up to which CE never left the tolerance around its value at i."""
    j = i
    while j + 1 < len(kept) and _ce_change(kept[i], kept[j + 1], limits).still:
        j += 1
    return j


# One watched number


@dataclass(frozen=True)
class WatchedValues:
    """A watched number at every checkpoint, with its resamples over the text.

    The same resamples of groups of blocks serve all checkpoints, so the spread of a change is that of paired differences. A
    quantile is tested at the highest level with at least 50 tokens beyond it.
    """

    watched: Watched
    shown_I: tuple[float | None, ...]
    """As the checkpoints report it."""
    tested_I: tuple[float | None, ...]
    """What changes are tested on: the same, or the quantile at `level`."""
    spread_IR: Floats | None = None
    """Resamples of `tested_I`; None where the number does not depend on tokens."""
    degrees: int = 0
    """Groups of blocks minus 1."""
    level: float | None = None
    """The tested quantile; None for what is not a quantile."""

    def moved(self, i: int, j: int, limits: DriftLimits) -> float | None:
        """|q_j − q_i| if the number q has moved from checkpoint i to j, else None. It has moved if

        |q_j − q_i| − h_ij  >  max(least change, least ratio · min(|q_i|, |q_j|))
        """
        before, after = self.tested_I[i], self.tested_I[j]
        if before is None or after is None:
            return None
        size, share = abs(after - before), limits.least_ratio * min(abs(before), abs(after))
        return size if size - self.noise(i, j) > max(self.watched.least_change(limits), share) else None

    def noise(self, i: int, j: int) -> float:
        """h_ij: half the width of the 95 % interval of the change over the text."""
        if self.spread_IR is None:
            return 0.0
        gaps_R = self.spread_IR[j] - self.spread_IR[i]
        gaps_R = gaps_R[np.isfinite(gaps_R)]
        if len(gaps_R) < self.spread_IR.shape[1] // 2 or self.degrees < 1:
            return math.inf
        return student_quantile(self.degrees) * float(np.std(gaps_R, ddof=1))

    def largest(self, pairs: Iterable[tuple[int, int]], limits: DriftLimits) -> tuple[int, int] | None:
        """The pair of checkpoints with the largest movement; None where the number moved over none of them."""
        sizes = {pair: size for pair in pairs if (size := self.moved(*pair, limits)) is not None}
        return max(sizes, key=lambda pair: sizes[pair], default=None)


def _watched_values(watched: Watched, kept: Sequence[KeptCheckpoint]) -> WatchedValues:
    shown = tuple(getattr(getattr(each.checkpoint, watched.coordinate), watched.key) for each in kept)
    if watched.tail is None and watched.mean is None:
        return WatchedValues(watched, shown, shown)
    tokens = kept[0].blocks.tokens
    level = None if watched.quantile is None else judged_level(sum(tokens), watched.quantile)
    key, tail = watched.tail or watched.mean or "", watched.tail is not None
    found = [block_values(each.blocks, key, tail=tail) for each in kept]
    group_B, drawn_RG = text_resamples(len(tokens))
    degrees = drawn_RG.shape[1] - 1
    known = [each for each in found if each is not None]
    if len(known) < len(found) or (watched.tail is not None and level is None):
        return WatchedValues(watched, shown, (None,) * len(shown), None, degrees, level)
    once_1G = np.ones((1, drawn_RG.shape[1]), dtype=np.int64)
    finish = np.sqrt if watched.mean is not None else np.asarray
    tested = [float(finish(resampled(each, group_B, once_1G, level))[0]) for each in known]
    spread_IR = np.stack([finish(resampled(each, group_B, drawn_RG, level)) for each in known])
    finite = tuple(value if math.isfinite(value) else None for value in tested)
    return WatchedValues(watched, shown, finite, spread_IR, degrees, level)


def _movement(
    values: WatchedValues, kept: Sequence[KeptCheckpoint], last_still: Sequence[int], limits: DriftLimits
) -> Movement:
    """What one number did over the run: the largest change while CE stood still, and where it began.

    "invisible": CE stayed within its tolerance from checkpoint i to every checkpoint up to j. "with_ce": the number moved only
    over stretches in which CE moved too. It began at the first k after i at which it had moved from its value at i.
    """
    watched = values.watched
    key, coordinate, name = watched.key, watched.coordinate, _name(watched.key, watched.coordinate)
    if all(value is None for value in values.shown_I):
        return Movement(key, coordinate, "open", f"{name} was not measured.")
    if all(value is None for value in values.tested_I):
        return Movement(key, coordinate, "open", f"The noise of {name} on this text is unknown.")
    pair = values.largest(((i, j) for i, end in enumerate(last_still) for j in range(i + 1, end + 1)), limits)
    invisible = pair is not None
    count = len(kept)
    pair = pair or values.largest(((i, j) for i in range(count) for j in range(i + 1, count)), limits)
    if pair is None:
        return Movement(key, coordinate, "quiet", f"{name} did not move.", level=values.level)
    i, j = pair
    k = next(k for k in range(i + 1, j + 1) if values.moved(i, k, limits) is not None)
    steps, ce_change = [each.checkpoint.step for each in kept], _ce_change(kept[i], kept[j], limits)
    before, after = values.shown_I[i], values.shown_I[j]
    return Movement(
        quantity=key,
        coordinate=coordinate,
        state="invisible" if invisible else "with_ce",
        reason=f"{name} {_verb(before, after)} between steps {steps[i]} and {steps[j]} while {_ce_phrase(ce_change)}; "
        f"it began between steps {steps[k - 1]} and {steps[k]}.",
        from_step=steps[i],
        to_step=steps[j],
        before=before,
        after=after,
        last_before=steps[k - 1],
        began=steps[k],
        noise=None if values.spread_IR is None else values.noise(i, j),
        level=values.level,
        ce_change=ce_change,
    )


# Sentences


def _name(key: str, coordinate: Coordinate) -> str:
    """A number in a sentence; μ exists in one coordinate only."""
    return symbol(key) if key in SHIFT_KEYS else f"{coordinate} {symbol(key)}"


def _verb(before: float | None, after: float | None) -> str:
    """ "rose from 1 to 2"."""
    if before is None or after is None:
        return "changed"
    return f"{'rose' if after > before else 'fell'} from {before:.4g} to {after:.4g}"


def _ce_phrase(change: CeChange) -> str:
    """What CE did meanwhile."""
    if change.difference is None:
        return "CE was not finite"
    interval = "" if change.half_width is None else f" ± {change.half_width:.2g}"
    # Below 1e-5 nat a difference is rounding of the forward pass.
    small = abs(change.difference) < 1e-5 and (change.half_width or 0) < 1e-5
    size = "less than 1e-5 nat" if small else f"{change.difference:+.2g}{interval} nat"
    return f"CE {'stood still' if change.still else 'moved'} ({size})"


def _finding(movements: Sequence[Movement], *, ce_stood_still: bool) -> str:
    """What matters, in a few sentences."""
    invisible = [movement for movement in movements if movement.state == "invisible"]
    if not invisible:
        return _quiet(movements, ce_stood_still=ce_stood_still)
    lead, *others = invisible
    sentences = [f"Drift that CE cannot see: {lead.reason}"]
    if lead.quantity in SHIFT_KEYS:
        centered = any(movement.coordinate == "centered" for movement in invisible)
        sentences.append(
            "The centered head moved too, so it is more than a common shift."
            if centered
            else "No number of the centered head moved with it: it is a common shift of all logits, "
            "which `zloss center` removes from a checkpoint and a penalty on μ holds in training."
        )
    if others:
        sentences.append(f"Also while CE stood still: {', '.join(_named(movement) for movement in others)}.")
    return " ".join(sentences)


def _quiet(movements: Sequence[Movement], *, ce_stood_still: bool) -> str:
    with_ce = [movement for movement in movements if movement.state == "with_ce"]
    if ce_stood_still:
        text = "No drift that CE cannot see: no watched number moved while CE stood still."
    else:
        text = "CE moved between every two neighbouring checkpoints, so no change happened while it stood still."
    if with_ce:
        text += f" Moved while CE moved: {', '.join(_named(movement) for movement in with_ce)}."
        if any(movement.quantity in SHIFT_KEYS for movement in with_ce):
            text += " Softmax does not depend on μ, so CE does not show that part of it at any step."
    return text


def _named(movement: Movement) -> str:
    name = _name(movement.quantity, movement.coordinate)
    if movement.before is None or movement.after is None:
        return name
    return f"{name} {movement.before:.4g} → {movement.after:.4g}"
