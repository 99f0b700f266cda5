"""The verdict on a method: accepted, rejected or inconclusive, from three parts.

The paper: an intervention is accepted only when the diagnosed coordinate improves and validation quality remains
acceptable, judged together with the optimizer-facing endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.verdict import with_verdict
from zloss.errors import InputError
from zloss.results.coordinate import Coordinate
from zloss.results.moe_config import OFF
from zloss.results.quality import QualityVerdict
from zloss.results.verdict import VerdictPart, VerdictParts
from zloss.train.compare.differences import difference
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.pairing import Pairing
from zloss.train.compare.verdict_parts import coordinate_part, quality_part

DIAGNOSED = "p_z_999"
"""Quantity of `delta_diagnosed` where none is stated."""


def judge(
    pairing: Pairing,
    optimizer: VerdictPart | None,
    *,
    tolerance: float,
    standard: Sequence[FinishedRun] = (),
    diagnosed: str | None = None,
    thresholds: Thresholds | None = None,
) -> QualityVerdict:
    """The verdict on one method; `optimizer` is its part of the optimizer-facing endpoints.

    `standard` are the runs of Standard at the method's λ, and `diagnosed` replaces what the method is meant to lower.
    """
    if not pairing.pairs:
        reason = "no run of this method shares a seed with the baseline"
        return QualityVerdict(pairing.method, pairing.coef, delta_ppl=None, accepted=None, reason=reason, reasons=())
    side = cast(Coordinate, pairing.runs[0].metrics.get("coordinate", "raw"))
    key = diagnosed or DIAGNOSED
    ppl = difference((base.metrics.get("ppl"), run.metrics.get("ppl")) for base, run in pairing.pairs)
    tail = difference(
        (base.metrics["heads"][side].get(key), run.metrics["heads"][side].get(key)) for base, run in pairing.pairs
    )
    if key not in pairing.runs[0].metrics["heads"][side]:
        known = ", ".join(pairing.runs[0].metrics["heads"][side])
        raise InputError(f"there is no diagnosed quantity {key!r} of a head: known are {known}.")
    parts = VerdictParts(
        coordinate=coordinate_part(pairing, standard, diagnosed, thresholds or Thresholds()),
        quality=quality_part(pairing, tolerance),
        optimizer=optimizer,
    )
    found = QualityVerdict(
        method=pairing.method,
        coef=pairing.coef,
        delta_ppl=None if ppl is None else ppl.mean,
        delta_ppl_std=None if ppl is None else ppl.std,
        within_tolerance=None if ppl is None else ppl.mean <= tolerance,
        coordinate=side,
        delta_diagnosed=None if tail is None else tail.mean,
        improves=None if tail is None else tail.mean < 0,
        accepted=None,
        reasons=(),
        parts=parts,
    )
    if parts.coordinate is None:
        what = "no router loss" if pairing.method.split(" + ")[0] == OFF else "no penalty"
        return replace(found, reason=f"{what}, so there is nothing to accept; its parts stand beside")
    return with_verdict(found, parts)
