"""Matched runs side by side: mean ± std over seeds, paired differences, and the paper's rule of acceptance.

A method is accepted when its diagnosed quantity improves (the paired difference, method and baseline in the same
coordinate, is negative) and the paired PPL difference stays within a stated tolerance. Differences are method minus
baseline, seed by seed; std is that of a sample (n − 1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from zloss.errors import InputError
from zloss.results.comparison import (
    ComparedMethod,
    ComparedProvenance,
    Comparison,
    HeadDifferences,
    HeadSummaries,
    PairedDifferences,
    Quality,
    QualityVerdict,
    SeedDifference,
    SeedSummary,
    TokenBudget,
)
from zloss.results.coordinate import Coordinate
from zloss.results.record import from_plain
from zloss.train.compare.curves import training_curves
from zloss.train.compare.finished_run import FinishedRun, check_pair
from zloss.train.compare.routers import router_section
from zloss.train.compare.trajectory import trajectory
from zloss.train.config import UNPENALIZED
from zloss.train.moe.config import MATCHED, OFF, REFERENCE
from zloss.train.provenance import made_by

TOLERANCE_SHARE = 0.01
"""Tolerated rise of PPL where none is stated, as a share of the baseline's."""
NOT_METRICS = ("coef", "seed", "steps", "diag_coef", "valid_predictions")


@dataclass(frozen=True)
class Pairing:
    """The runs of one method and coefficient, each with the baseline run of its seed."""

    runs: tuple[FinishedRun, ...]
    pairs: tuple[tuple[FinishedRun, FinishedRun], ...]
    """(baseline, run), by seed."""

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def coef(self) -> float:
        return self.runs[0].coef


def compare_runs(
    runs: Sequence[FinishedRun],
    *,
    baseline: str | None = None,
    tolerance_ppl: float | None = None,
    diagnosed: str = "p_z_999",
    unfinished: Sequence[str] = (),
) -> Comparison:
    """Pair by seed, refuse what is not matched, and judge every method.

    The default `baseline` is CE, and the token-layer mean among router variants.
    """
    base = _baseline_runs(runs, baseline or _usual_baseline(runs))
    by_seed = {run.seed: run for run in base}
    groups: dict[tuple[str, float], list[FinishedRun]] = {}
    for run in runs:
        # Means over seeds are of one experiment, also where a run has no partner.
        check_pair(base[0], run)
        same = next((other for other in groups.get(run.key, ()) if other.seed == run.seed), None)
        if same is not None:
            raise InputError(
                f"{same.folder.name} and {run.folder.name} are the same run (method, coefficient and seed): remove one."
            )
        groups.setdefault(run.key, []).append(run)
    pairings = [_pair(group, by_seed) for group in groups.values()]
    pairings.sort(key=lambda p: (p.runs[0].key != base[0].key, p.method not in (*UNPENALIZED, OFF), p.method, p.coef))
    if tolerance_ppl is not None and not math.isfinite(tolerance_ppl):
        raise InputError(f"`tolerance_ppl` is expected to be a finite number, but got {tolerance_ppl!r}.")
    stated = tolerance_ppl is not None
    if tolerance_ppl is None:
        tolerance_ppl = TOLERANCE_SHARE * _mean(_numbers(run.metrics.get("ppl") for run in base), "ppl of the baseline")
    others = [pairing for pairing in pairings if pairing.runs[0].key != base[0].key]
    routed = any(run.moe is not None for run in runs)
    first = base[0].metrics
    made = made_by(runs)
    return Comparison(
        baseline=base[0].method,
        baseline_coef=base[0].coef,
        seeds=tuple(sorted(by_seed)),
        steps=first.get("steps"),
        methods=tuple(_method(pairing, paired=pairing in others) for pairing in pairings),
        quality=Quality(
            tolerance_ppl=tolerance_ppl,
            tolerance="stated" if stated else f"{TOLERANCE_SHARE:.0%} of the baseline's PPL, as none was stated",
            diagnosed=diagnosed,
            methods=tuple(_verdict(pairing, diagnosed, tolerance_ppl) for pairing in others),
        ),
        router=router_section(pairings, by_seed) if routed else None,
        tokens=TokenBudget(
            available=first.get("tokens_available"), consumed=first.get("tokens_consumed"), reuse=first.get("reuse")
        ),
        unpaired=tuple(run.folder.name for pairing in others for run in pairing.runs if run.seed not in by_seed),
        unfinished=tuple(unfinished),
        provenance=None if made is None else from_plain(ComparedProvenance, made, path="provenance"),
        curves=training_curves(runs),
    )


def _baseline_runs(runs: Sequence[FinishedRun], name: str) -> list[FinishedRun]:
    """The runs of `method` or `method:coef`; the name of a router variant may hold a colon of its own."""
    method, coef = name, None
    head, _, tail = name.rpartition(":")
    if head and tail != MATCHED:
        try:
            method, coef = head, float(tail)
        except ValueError:
            raise InputError(f"the baseline {name!r} is expected to be METHOD or METHOD:COEFFICIENT.") from None
    found = [run for run in runs if run.method == method and coef in (None, run.coef)]
    if not found:
        known = ", ".join(sorted({run.method for run in runs}))
        raise InputError(f"there is no run of the baseline {name!r}: known are {known}.")
    coefs = sorted({run.coef for run in found})
    if len(coefs) > 1:
        raise InputError(
            f"the baseline {name!r} was run with several coefficients: "
            f"name one of {', '.join(f'{method}:{coef:g}' for coef in coefs)}."
        )
    return found


def _usual_baseline(runs: Sequence[FinishedRun]) -> str:
    if all(run.moe is None for run in runs):
        return "ce"
    return REFERENCE if any(run.method == REFERENCE for run in runs) else OFF


def _pair(group: Sequence[FinishedRun], by_seed: Mapping[int, FinishedRun]) -> Pairing:
    pairs = tuple((by_seed[run.seed], run) for run in group if run.seed in by_seed)
    return Pairing(tuple(sorted(group, key=lambda run: run.seed)), pairs)


def _method(pairing: Pairing, *, paired: bool) -> ComparedMethod:
    """Deployed metrics over the seeds that have a partner, and both coordinates of the head."""
    shown = [run for _, run in pairing.pairs] or list(pairing.runs)
    metrics = [run.metrics for run in shown]

    def head(side: Coordinate) -> dict[str, SeedSummary]:
        keys = metrics[0]["heads"][side]
        found = {key: _summary(m["heads"][side].get(key) for m in metrics) for key in keys}
        return {key: summary for key, summary in found.items() if summary is not None}

    return ComparedMethod(
        method=pairing.method,
        coef=pairing.coef,
        coordinate=metrics[0].get("coordinate"),
        seeds=tuple(run.seed for run in shown),
        metrics={key: summary for key in _keys(metrics) if (summary := _summary(m.get(key) for m in metrics))},
        heads=HeadSummaries(head("raw"), head("centered")),
        paired=_differences(pairing) if paired else None,
    )


def _differences(pairing: Pairing) -> PairedDifferences:
    """Method minus baseline, seed by seed: deployed values, the head in each coordinate, and the loss trajectories."""
    metrics = [(base.metrics, run.metrics) for base, run in pairing.pairs]
    keys = _keys([pair[1] for pair in metrics]) if metrics else []

    def head(side: Coordinate) -> dict[str, SeedDifference]:
        keys = metrics[0][1]["heads"][side] if metrics else ()
        found = {
            key: _difference((b["heads"][side].get(key), m["heads"][side].get(key)) for b, m in metrics) for key in keys
        }
        return {key: difference for key, difference in found.items() if difference is not None}

    return PairedDifferences(
        pairs=len(pairing.pairs),
        deployed={key: found for key in keys if (found := _difference((b.get(key), m.get(key)) for b, m in metrics))},
        same_coordinate=HeadDifferences(head("raw"), head("centered")),
        trajectory=tuple(trajectory(base, run) for base, run in pairing.pairs),
    )


def _verdict(pairing: Pairing, diagnosed: str, tolerance: float) -> QualityVerdict:
    """The rule on one method. A change of coordinate alone is judged by its PPL alone."""
    if not pairing.pairs:
        reason = "no run of this method shares a seed with the baseline"
        return QualityVerdict(pairing.method, pairing.coef, delta_ppl=None, accepted=None, reason=reason)
    side = cast(Coordinate, pairing.runs[0].metrics.get("coordinate", "raw"))
    ppl = _difference((base.metrics.get("ppl"), run.metrics.get("ppl")) for base, run in pairing.pairs)
    tail = _difference(
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


def _keys(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Flat numeric metrics, in the order of metrics.json."""
    return [
        key
        for key, value in metrics[0].items()
        if key not in NOT_METRICS and not isinstance(value, (dict, list, str, bool))
    ]


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _mean(values: list[float], what: str) -> float:
    if not values:
        raise InputError(f"the {what} is not a number in any run.")
    return statistics.fmean(values)


def _summary(values: Iterable[Any]) -> SeedSummary | None:
    numbers = _numbers(values)
    return SeedSummary(statistics.fmean(numbers), _std(numbers), len(numbers)) if numbers else None


def _difference(pairs: Iterable[tuple[Any, Any]]) -> SeedDifference | None:
    """Mean and std of method − baseline, and the mean ratio; None where a pair lacks a number."""
    listed = list(pairs)
    complete = [(b[0], t[0]) for before, after in listed if (b := _numbers([before])) and (t := _numbers([after]))]
    if not listed or len(complete) < len(listed):
        return None
    gaps = [target - base for base, target in complete]
    ratios = [target / base for base, target in complete if base]
    return SeedDifference(
        mean=statistics.fmean(gaps),
        std=_std(gaps),
        by_seed=tuple(gaps),
        ratio=statistics.fmean(ratios) if len(ratios) == len(complete) else None,
    )


def _std(numbers: Sequence[float]) -> float | None:
    return statistics.stdev(numbers) if len(numbers) > 1 else None
