"""Numbers over seeds: means of a method, and its differences from the baseline, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from zloss.results.comparison import (
    ComparedMethod,
    HeadDifferences,
    HeadSummaries,
    PairedDifferences,
    SeedDifference,
    SeedSummary,
)
from zloss.results.coordinate import Coordinate
from zloss.train.compare.pairing import Pairing
from zloss.train.compare.trajectory import trajectory

NOT_METRICS = ("coef", "seed", "steps", "diag_coef", "valid_predictions")
"""Numbers of metrics.json that are settings."""


def compared_method(pairing: Pairing, *, paired: bool) -> ComparedMethod:
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
            key: difference((b["heads"][side].get(key), m["heads"][side].get(key)) for b, m in metrics) for key in keys
        }
        return {key: gap for key, gap in found.items() if gap is not None}

    return PairedDifferences(
        pairs=len(pairing.pairs),
        deployed={key: found for key in keys if (found := difference((b.get(key), m.get(key)) for b, m in metrics))},
        same_coordinate=HeadDifferences(head("raw"), head("centered")),
        trajectory=tuple(trajectory(base, run) for base, run in pairing.pairs),
    )


def _keys(metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Flat numeric metrics, in the order of metrics.json."""
    return [
        key
        for key, value in metrics[0].items()
        if key not in NOT_METRICS and not isinstance(value, (dict, list, str, bool))
    ]


def numbers_in(values: Iterable[Any]) -> list[float]:
    """The numbers among `values`; null, text and flags are left out."""
    return [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _summary(values: Iterable[Any]) -> SeedSummary | None:
    numbers = numbers_in(values)
    return SeedSummary(statistics.fmean(numbers), _std(numbers), len(numbers)) if numbers else None


def difference(pairs: Iterable[tuple[Any, Any]]) -> SeedDifference | None:
    """Mean and std of method − baseline, and the mean ratio; None where a pair lacks a number."""
    listed = list(pairs)
    complete = [(b[0], t[0]) for before, after in listed if (b := numbers_in([before])) and (t := numbers_in([after]))]
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
