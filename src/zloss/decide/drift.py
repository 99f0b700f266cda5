"""What moved between the checkpoints of a run, when it began, and whether the loss curve shows it.

Axes: I checkpoints, R resamples of the text, B blocks, G groups of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

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
from zloss.decide.stages import inside, signed
from zloss.decide.thresholds import Limits, Thresholds
from zloss.errors import InputError
from zloss.results.drift import CeChange, Drift, KeptCheckpoint, Movement
from zloss.results.options import Coordinate
from zloss.results.provenance import Provenance
from zloss.results.quantities import IN_PASSING, NAMES, plain_name, symbol
from zloss.results.run_metrics import GAIN, SHIFT, SHIFT_SQUARED, VIOLATION

Floats = NDArray[np.float64]
LEAST_CHECKPOINTS = 2


@dataclass(frozen=True)
class DriftLimits(Limits):
    """When a number of a head counts as moved, and when cross-entropy counts as still.

    The paper does not compare checkpoints of one run: these limits are ours, each with its reason.
    """

    ppl_tolerance: float = 0.01
    """CE counts as unchanged between two checkpoints when the 95 % interval of its paired change stays within this share of
    PPL: the tolerance of the quality gate."""
    least_ratio: float = 0.1
    """A number moves only when it changes by more than this share of the smaller of its two values, after its noise over
    the text is subtracted."""
    least_nats: float = 1.0
    """p99 |μ|, rms μ and P_Z^99.9 move only when they change by more than this, in nats: at λ = 1e-4 a violation of one nat
    adds 1e-4 nat to the loss."""
    least_gain: float = 1.0
    """A_p^99 moves only when it changes by more than this: a tenth of the gain at which the transport stage fires."""
    least_r_z: float = 0.005
    """R_Z moves only when it changes by more than this: a tenth of the R_Z budget."""
    least_share: float = 0.01
    """E_1 moves only when it changes by more than this share of the head's energy."""

    @property
    def ce_tolerance(self) -> float:
        """`ppl_tolerance` in nats of CE: log(1 + share)."""
        return math.log1p(self.ppl_tolerance)


@dataclass(frozen=True)
class Watched:
    """One number of `DriftNumbers` in one coordinate."""

    key: str
    coordinate: Coordinate
    limit: str | None
    """Name of its smallest change among `DriftLimits`; None for the ratio alone."""
    values: str | None = None
    """The token quantity whose quantile it is, or of whose mean it is the square root. A number without one does not depend on
    tokens, or is not known block by block: its noise over the text is taken as 0."""
    quantile: float | None = None
    """The quantile; None for a mean."""


RAW: tuple[Coordinate, ...] = ("raw",)
BOTH: tuple[Coordinate, ...] = ("raw", "centered")
WATCHED = tuple(
    Watched(key, coordinate, limit, f"{values}.{coordinate}" if values else None, quantile)
    for coordinates, key, limit, values, quantile in (
        # A centered μ is rounding noise.
        (RAW, "mu_abs_99", "least_nats", SHIFT, 0.99),
        (RAW, "mu_rms", "least_nats", SHIFT_SQUARED, None),
        (BOTH, "p_z_999", "least_nats", VIOLATION, 0.999),
        (BOTH, "a_p_99", "least_gain", GAIN, 0.99),
        (BOTH, "sigma_1", None, None, None),
        (BOTH, "e_1", "least_share", None, None),
        (BOTH, "r_z", "least_r_z", None, None),
    )
    for coordinate in coordinates
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
    movements = tuple(_movement(WatchedValues(watched, kept, limits), kept, last_still) for watched in WATCHED)
    return Drift(
        model=model,
        corpus=first.corpus,
        blocks=len(first.blocks.tokens),
        block_size=max(first.blocks.tokens),
        checkpoints=tuple(each.checkpoint for each in kept),
        ce_changes=tuple(_ce_change(before, after, limits) for before, after in pairwise(kept)),
        movements=movements,
        finding=_finding(
            movements, first.checkpoint.vocab, ce_stood_still=any(j > i for i, j in enumerate(last_still))
        ),
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


class WatchedValues:
    """A watched number at every checkpoint, with its resamples over the text.

    The same resamples of groups of blocks serve all checkpoints, so the spread of a change is that of paired differences. A
    quantile is tested at the highest level with at least 50 tokens beyond it.
    """

    def __init__(self, watched: Watched, kept: Sequence[KeptCheckpoint], limits: DriftLimits) -> None:
        self.watched, self.limits = watched, limits
        numbers = [getattr(each.checkpoint, watched.coordinate) for each in kept]
        self.shown_I: list[float | None] = [getattr(each, watched.key) for each in numbers]
        """As the checkpoints report it."""
        self.tested_I = self.shown_I
        """The values that changes are tested on: `shown_I`, or the quantile at `level`."""
        self.level: float | None = None
        """The tested quantile; None if it is not a quantile."""
        self.spread_IR: Floats | None = None
        """Resamples of `tested_I`; None if the number does not depend on tokens."""
        if watched.values is None:
            return
        tokens, tail = kept[0].blocks.tokens, watched.quantile is not None
        self.level = None if watched.quantile is None else judged_level(sum(tokens), watched.quantile)
        found = [block_values(each.blocks, watched.values, tail=tail) for each in kept]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or (tail and self.level is None):
            self.tested_I = [None] * len(kept)
            return
        group_B, drawn_RG = text_resamples(len(tokens))
        once_1G = np.ones((1, drawn_RG.shape[1]), dtype=np.int64)
        tested_I1, self.spread_IR = (
            np.stack([resampled(each, group_B, counts, self.level) for each in known]) for counts in (once_1G, drawn_RG)
        )
        if not tail:
            tested_I1, self.spread_IR = np.sqrt(tested_I1), np.sqrt(self.spread_IR)
        self.tested_I = [float(value) if math.isfinite(value) else None for value in tested_I1[:, 0]]
        self.degrees = drawn_RG.shape[1] - 1

    def moved(self, i: int, j: int) -> float | None:
        """|q_j − q_i| if the number q has moved from checkpoint i to j, else None. It has moved if

        |q_j − q_i| − h_ij  >  max(least change, least ratio · min(|q_i|, |q_j|))
        """
        before, after = self.tested_I[i], self.tested_I[j]
        if before is None or after is None:
            return None
        least = 0.0 if self.watched.limit is None else getattr(self.limits, self.watched.limit)
        size, share = abs(after - before), self.limits.least_ratio * min(abs(before), abs(after))
        return size if size - (self.noise(i, j) or 0.0) > max(least, share) else None

    def noise(self, i: int, j: int) -> float | None:
        """h_ij: half the width of the 95 % interval of the change over the text; None if there is none."""
        if self.spread_IR is None:
            return None
        gaps_R = self.spread_IR[j] - self.spread_IR[i]
        gaps_R = gaps_R[np.isfinite(gaps_R)]
        if len(gaps_R) < self.spread_IR.shape[1] // 2 or self.degrees < 1:
            return math.inf
        return student_quantile(self.degrees) * float(np.std(gaps_R, ddof=1))

    def largest(self, pairs: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """The pair of checkpoints with the largest movement; None if the number moved over none of them."""
        sizes = {pair: size for pair in pairs if (size := self.moved(*pair)) is not None}
        return max(sizes, key=lambda pair: sizes[pair], default=None)


def _movement(values: WatchedValues, kept: Sequence[KeptCheckpoint], last_still: Sequence[int]) -> Movement:
    """What one number did over the run: the largest change while CE did not move, and where it began.

    "invisible": CE stayed within its tolerance from checkpoint i to every checkpoint up to j. "with_ce": the number moved only
    over stretches in which CE moved too. It began at the first k after i at which it had moved from its value at i.
    """
    watched, limits, count = values.watched, values.limits, len(kept)
    key, coordinate = watched.key, watched.coordinate
    name = plain_name(key) if key in SHIFT_KEYS else f"{plain_name(key)} of the {coordinate} head"
    if all(value is None for value in values.shown_I):
        return Movement(key, coordinate, "open", f"{name} was not measured.")
    if all(value is None for value in values.tested_I):
        return Movement(key, coordinate, "open", f"{name}: its noise on this text is unknown.")
    invisible = values.largest((i, j) for i, end in enumerate(last_still) for j in range(i + 1, end + 1))
    pair = invisible or values.largest(combinations(range(count), 2))
    if pair is None:
        return Movement(key, coordinate, "quiet", f"{name} did not move.", level=values.level)
    i, j = pair
    k = next(k for k in range(i + 1, j + 1) if values.moved(i, k) is not None)
    steps, ce_change = [each.checkpoint.step for each in kept], _ce_change(kept[i], kept[j], limits)
    before, after, verb = values.shown_I[i], values.shown_I[j], "changed"
    if before is not None and after is not None:
        verb = f"{'rose' if after > before else 'fell'} from {before:.4g} to {after:.4g}"
    return Movement(
        quantity=key,
        coordinate=coordinate,
        state="invisible" if invisible else "with_ce",
        reason=f"{name} {verb} between steps {steps[i]} and {steps[j]} while {_ce_phrase(ce_change)}; "
        f"it began between steps {steps[k - 1]} and {steps[k]}.",
        from_step=steps[i],
        to_step=steps[j],
        before=before,
        after=after,
        last_before=steps[k - 1],
        began=steps[k],
        noise=values.noise(i, j),
        level=values.level,
        ce_change=ce_change,
    )


# Sentences


def audit_limit(movement: Movement, vocab: int) -> float | None:
    """The value at which an audit begins to ask whether the number matters; None for a number without a limit."""
    limits = Thresholds()
    known = {
        "mu_abs_99": limits.shift_over_log_v * math.log(vocab),
        "a_p_99": limits.gain_99,
        "r_z": limits.r_z_budget,
    }
    return known.get(movement.quantity) if movement.coordinate == "raw" else None


def within_audit_limit(movement: Movement, vocab: int) -> bool:
    """Whether the number ended within the limit of an audit."""
    limit = audit_limit(movement, vocab)
    return limit is not None and movement.after is not None and movement.after <= limit


def _described(movement: Movement, vocab: int) -> str:
    """What a number is, how it changed, and whether an audit would ask about it, in a phrase."""
    key, limit = movement.quantity, audit_limit(movement, vocab)
    head = "" if key in SHIFT_KEYS else f" of the {movement.coordinate} head"
    said = f"{inside(NAMES[key])}{head} ({symbol(key)}, {IN_PASSING[key]})"
    if movement.before is not None and movement.after is not None:
        said += f" {movement.before:.4g} → {movement.after:.4g}"
    if limit is None:
        return said
    small = within_audit_limit(movement, vocab)
    return f"{said}, {'within' if small else 'beyond'} the limit of {limit:.3g}{', so it does not matter' if small else ''}"


def _ce_phrase(change: CeChange) -> str:
    """What CE did meanwhile.

    >>> _ce_phrase(CeChange(0, 100, 2e-7, 3e-7, still=True)), _ce_phrase(CeChange(0, 100, 2e-5, 3e-7, still=True))
    ('CE did not move (less than 1e-5 nat)', 'CE did not move (+2e-05 ± 3e-07 nat)')
    """
    if change.difference is None:
        return "CE was not finite"
    interval = "" if change.half_width is None else f" ± {change.half_width:.2g}"
    # Below 1e-5 nat a difference is rounding of the forward pass.
    small = abs(change.difference) < 1e-5 and (change.half_width or 0) < 1e-5
    size = "less than 1e-5 nat" if small else f"{signed(change.difference, 2)}{interval} nat"
    return f"CE {'did not move' if change.still else 'moved'} ({size})"


def _finding(movements: Sequence[Movement], vocab: int, *, ce_stood_still: bool) -> str:
    """What matters, in a few sentences."""
    invisible, with_ce = ([m for m in movements if m.state == state] for state in ("invisible", "with_ce"))
    if invisible:
        lead, *others = invisible
        text = f"Drift that CE cannot see: the {inside(lead.reason)}"
        if lead.quantity in SHIFT_KEYS:
            text += (
                " The centered head moved too, so it is more than a common shift."
                if any(movement.coordinate == "centered" for movement in invisible)
                else " No number of the centered head moved with it: it is a common shift of all logits, which `zloss center` "
                "removes from a checkpoint and a penalty on μ limits in training."
            )
        return text + (f" Also while CE did not move: {_list(others, vocab)}." if others else "")
    text = "CE moved between all adjacent checkpoints, so the loss curve hides no change."
    if ce_stood_still:
        text = "No drift that CE cannot see: no watched number moved while CE did not move."
    if with_ce:
        text += f" Moved while CE moved: {_list(with_ce, vocab)}."
    if any(movement.quantity in SHIFT_KEYS for movement in with_ce):
        text += " Softmax does not depend on μ, so CE does not show that part of it at any step."
    return text


def _list(movements: Sequence[Movement], vocab: int) -> str:
    return "; ".join(_described(one, vocab) for one in movements)
