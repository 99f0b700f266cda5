"""The paper's rule of acceptance.

A method is accepted when its diagnosed quantity improves (the paired difference, method and baseline in the same
coordinate, is negative) and the paired PPL difference stays within a stated tolerance.
"""

from __future__ import annotations

from typing import cast

from zloss.errors import InputError
from zloss.results.comparison import QualityVerdict, SeedDifference
from zloss.results.coordinate import Coordinate
from zloss.results.train_config import UNPENALIZED
from zloss.train.compare.differences import difference
from zloss.train.compare.pairing import Pairing


def judge(pairing: Pairing, diagnosed: str, tolerance: float) -> QualityVerdict:
    """The rule on one method. A change of coordinate alone is judged by its PPL alone."""
    if not pairing.pairs:
        reason = "no run of this method shares a seed with the baseline"
        return QualityVerdict(pairing.method, pairing.coef, delta_ppl=None, accepted=None, reason=reason)
    side = cast(Coordinate, pairing.runs[0].metrics.get("coordinate", "raw"))
    ppl = difference((base.metrics.get("ppl"), run.metrics.get("ppl")) for base, run in pairing.pairs)
    tail = difference(
        (base.metrics["heads"][side].get(diagnosed), run.metrics["heads"][side].get(diagnosed))
        for base, run in pairing.pairs
    )
    if diagnosed not in pairing.runs[0].metrics["heads"][side]:
        known = ", ".join(pairing.runs[0].metrics["heads"][side])
        raise InputError(f"there is no diagnosed quantity {diagnosed!r} of a head: known are {known}.")
    within = None if ppl is None else ppl.mean <= tolerance
    improves = None if tail is None else tail.mean < 0
    accepted: bool | None
    if ppl is None:
        accepted, reason = False, "its PPL is not finite on every seed"
    elif pairing.runs[0].moe is not None:
        accepted, reason = None, "a router variant: only its PPL is judged here, its scale and entropy stand beside it"
    elif pairing.method in UNPENALIZED:
        accepted, reason = None, "a change of coordinate, not of the objective: only its PPL is judged"
    else:
        accepted = bool(within and improves)
        compared = "cannot be compared" if tail is None else _improvement(tail)
        reason = f"{diagnosed} ({side}) {compared}; PPL {'within' if within else 'beyond'} the tolerance"
    return QualityVerdict(
        method=pairing.method,
        coef=pairing.coef,
        delta_ppl=None if ppl is None else ppl.mean,
        delta_ppl_std=None if ppl is None else ppl.std,
        within_tolerance=within,
        coordinate=side,
        delta_diagnosed=None if tail is None else tail.mean,
        improves=improves,
        accepted=accepted,
        reason=reason,
    )


def _improvement(difference: SeedDifference) -> str:
    """Whether a tail falls, and whether the seeds agree on it."""
    word = "improves" if difference.mean < 0 else "does not improve"
    signs = {gap < 0 for gap in difference.by_seed}
    return word if len(signs) == 1 else f"{word} on average, but not alike on every seed"
