"""Matched runs side by side: mean ± std over seeds, paired differences, and the paper's rule of acceptance.

A method is accepted when its diagnosed coordinate improves (the paired difference of a tail, method and baseline read in
the same coordinate, is negative) and the paired PPL difference stays within a stated tolerance. Differences are target
minus baseline, seed by seed; std is that of a sample (n − 1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zloss.errors import InputError
from zloss.results.moe_config import MATCHED, OFF, REFERENCE
from zloss.results.train_config import UNPENALIZED
from zloss.train.compare.curves import training_curves
from zloss.train.compare.finished_run import FinishedRun, check_pair
from zloss.train.compare.provenance import made_by
from zloss.train.compare.routers import router_section
from zloss.train.compare.trajectory import trajectory

SCHEMA = "zloss.comparison/1"
TOLERANCE_SHARE = 0.01
"""Tolerated rise of PPL where none is stated, as a share of the baseline's."""
NOT_METRICS = ("coef", "seed", "steps", "diag_coef", "valid_predictions")
SIDES = ("raw", "centered")


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
) -> dict[str, Any]:
    """Pair by seed, refuse what is not matched, and judge every method.

    Without a `baseline` it is CE, and the token-layer mean among router variants.
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
        raise InputError(f"--tolerance-ppl is expected to be a finite number, but got {tolerance_ppl!r}.")
    stated = tolerance_ppl is not None
    if tolerance_ppl is None:
        tolerance_ppl = TOLERANCE_SHARE * _mean(_numbers(run.metrics.get("ppl") for run in base), "ppl of the baseline")
    others = [pairing for pairing in pairings if pairing.runs[0].key != base[0].key]
    routed = any(run.moe is not None for run in runs)
    return {
        "schema": SCHEMA,
        "baseline": base[0].method,
        "baseline_coef": base[0].coef,
        "seeds": sorted(by_seed),
        "steps": base[0].metrics.get("steps"),
        "std": "sample standard deviation over seeds (n − 1)",
        "methods": [
            {**_method(pairing), "paired": _differences(pairing) if pairing in others else None} for pairing in pairings
        ],
        "quality": {
            "tolerance_ppl": tolerance_ppl,
            "tolerance": "stated" if stated else f"{TOLERANCE_SHARE:.0%} of the baseline's PPL, as none was stated",
            "diagnosed": diagnosed,
            "methods": [_verdict(pairing, diagnosed, tolerance_ppl) for pairing in others],
        },
        **({"router": router_section(pairings, by_seed)} if routed else {}),
        "tokens": {key: base[0].metrics.get(f"tokens_{key}") for key in ("available", "consumed")}
        | {"reuse": base[0].metrics.get("reuse")},
        "unpaired": [run.folder.name for pairing in others for run in pairing.runs if run.seed not in by_seed],
        "unfinished": list(unfinished),
        "provenance": made_by(runs),
        "curves": training_curves(runs),
    }


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
        raise InputError(f"there is no run of the baseline {name!r}: the folder has {known}. Choose with --baseline.")
    coefs = sorted({run.coef for run in found})
    if len(coefs) > 1:
        raise InputError(
            f"the baseline {name!r} was run with coefficients {', '.join(f'{coef:g}' for coef in coefs)}: "
            f"name one, as in --baseline {method}:{coefs[0]:g}."
        )
    return found


def _usual_baseline(runs: Sequence[FinishedRun]) -> str:
    if all(run.moe is None for run in runs):
        return "ce"
    return REFERENCE if any(run.method == REFERENCE for run in runs) else OFF


def _pair(group: Sequence[FinishedRun], by_seed: Mapping[int, FinishedRun]) -> Pairing:
    pairs = tuple((by_seed[run.seed], run) for run in group if run.seed in by_seed)
    return Pairing(tuple(sorted(group, key=lambda run: run.seed)), pairs)


def _method(pairing: Pairing) -> dict[str, Any]:
    """Deployed metrics as {mean, std, n} over the seeds that have a partner; both coordinates beside them."""
    shown = [run for _, run in pairing.pairs] or list(pairing.runs)
    metrics = [run.metrics for run in shown]
    return {
        "method": pairing.method,
        "coef": pairing.coef,
        "coordinate": metrics[0].get("coordinate"),
        "seeds": [run.seed for run in shown],
        "metrics": {key: summary for key in _keys(metrics) if (summary := _summary(m.get(key) for m in metrics))},
        "heads": {
            side: {
                key: summary
                for key in metrics[0]["heads"][side]
                if (summary := _summary(m["heads"][side].get(key) for m in metrics))
            }
            for side in SIDES
        },
    }


def _differences(pairing: Pairing) -> dict[str, Any]:
    """Target minus baseline, seed by seed: deployed values, the same in each coordinate, and the loss trajectories."""
    metrics = [(base.metrics, run.metrics) for base, run in pairing.pairs]
    keys = _keys([pair[1] for pair in metrics]) if metrics else []
    return {
        "pairs": len(pairing.pairs),
        "deployed": {
            key: found for key in keys if (found := _difference((b.get(key), m.get(key)) for b, m in metrics))
        },
        "same_coordinate": {
            side: {
                key: found
                for key in (metrics[0][1]["heads"][side] if metrics else ())
                if (found := _difference((b["heads"][side].get(key), m["heads"][side].get(key)) for b, m in metrics))
            }
            for side in SIDES
        },
        "trajectory": [trajectory(base, run) for base, run in pairing.pairs],
    }


def _verdict(pairing: Pairing, diagnosed: str, tolerance: float) -> dict[str, Any]:
    """The rule on one method; a pure change of coordinate is judged by its quality alone."""
    if not pairing.pairs:
        return {"method": pairing.method, "coef": pairing.coef, "delta_ppl": None, "accepted": None,
                "reason": "no run of this method shares a seed with the baseline"}  # fmt: skip
    side = str(pairing.runs[0].metrics.get("coordinate", "raw"))
    ppl = _difference((base.metrics.get("ppl"), run.metrics.get("ppl")) for base, run in pairing.pairs)
    tail = _difference(
        (base.metrics["heads"][side].get(diagnosed), run.metrics["heads"][side].get(diagnosed))
        for base, run in pairing.pairs
    )
    if diagnosed not in pairing.runs[0].metrics["heads"][side]:
        known = ", ".join(pairing.runs[0].metrics["heads"][side])
        raise InputError(f"there is no diagnosed quantity {diagnosed!r} of a head: known are {known}.")
    within = None if ppl is None else ppl["mean"] <= tolerance
    improves = None if tail is None else tail["mean"] < 0
    gauge_only = pairing.method in UNPENALIZED
    routed = pairing.runs[0].moe is not None
    accepted: bool | None
    if ppl is None:
        accepted, reason = False, "its PPL is not finite on every seed"
    elif routed:
        accepted, reason = None, "a router variant: only its PPL is judged here, its scale and entropy stand beside it"
    elif gauge_only:
        accepted, reason = None, "a change of coordinate, not of the objective: only its PPL is judged"
    else:
        accepted = bool(within and improves)
        reason = "; ".join(
            (
                f"{diagnosed} ({side}) {_improvement(tail)}"
                if tail is not None
                else f"{diagnosed} ({side}) cannot be compared",
                f"PPL {'within' if within else 'beyond'} the tolerance",
            )
        )
    return {
        "method": pairing.method,
        "coef": pairing.coef,
        "delta_ppl": None if ppl is None else ppl["mean"],
        "delta_ppl_std": None if ppl is None else ppl["std"],
        "within_tolerance": within,
        "coordinate": side,
        "delta_diagnosed": None if tail is None else tail["mean"],
        "improves": improves,
        "accepted": accepted,
        "reason": reason,
    }


def _improvement(difference: Mapping[str, Any]) -> str:
    """Whether a tail falls; seeds that disagree are said to."""
    word = "improves" if difference["mean"] < 0 else "does not improve"
    signs = {gap < 0 for gap in difference["by_seed"]}
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


def _summary(values: Iterable[Any]) -> dict[str, Any] | None:
    numbers = _numbers(values)
    if not numbers:
        return None
    return {"mean": statistics.fmean(numbers), "std": _std(numbers), "n": len(numbers)}


def _difference(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any] | None:
    """Mean and std of target − baseline, and the mean ratio; None where a pair lacks a number."""
    listed = list(pairs)
    complete = [(b[0], t[0]) for before, after in listed if (b := _numbers([before])) and (t := _numbers([after]))]
    if not listed or len(complete) < len(listed):
        return None
    gaps = [target - base for base, target in complete]
    ratios = [target / base for base, target in complete if base]
    return {
        "mean": statistics.fmean(gaps),
        "std": _std(gaps),
        "by_seed": gaps,
        "ratio": statistics.fmean(ratios) if len(ratios) == len(complete) else None,
    }


def _std(numbers: Sequence[float]) -> float | None:
    return statistics.stdev(numbers) if len(numbers) > 1 else None
