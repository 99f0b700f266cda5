"""Runs of one experiment grouped by method, each run with the baseline run of its seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zloss.errors import InputError
from zloss.results.moe_config import MATCHED, OFF, REFERENCE
from zloss.results.train_config import UNPENALIZED
from zloss.train.compare.finished_run import FinishedRun, check_pair
from zloss.train.folder.step_log import STEPS_FILE


@dataclass(frozen=True)
class Pairing:
    """The runs of one method and coefficient, by seed."""

    runs: tuple[FinishedRun, ...]
    pairs: tuple[tuple[FinishedRun, FinishedRun], ...]
    """(baseline, run) of every seed that the baseline has."""

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def coef(self) -> float:
        return self.runs[0].coef

    @property
    def key(self) -> tuple[str, float]:
        """Method and coefficient."""
        return self.runs[0].key


def pair_runs(runs: Sequence[FinishedRun], base: Sequence[FinishedRun]) -> list[Pairing]:
    """One pairing per method and coefficient, the baseline first; runs of another experiment are refused."""
    refuse_copies(runs)
    by_seed = {run.seed: run for run in base}
    groups: dict[tuple[str, float], list[FinishedRun]] = {}
    for run in runs:
        # Means over seeds are of one experiment, also where a run has no partner.
        check_pair(base[0], run)
        if run.seed in by_seed:
            check_pair(by_seed[run.seed], run)
        same = next((other for other in groups.get(run.key, ()) if other.seed == run.seed), None)
        if same is not None:
            raise InputError(
                f"{same.folder.name} and {run.folder.name} are the same run (method, coefficient and seed): remove one."
            )
        groups.setdefault(run.key, []).append(run)
    pairings = [_pair(group, by_seed) for group in groups.values()]
    return sorted(pairings, key=lambda p: (p.key != base[0].key, p.method not in (*UNPENALIZED, OFF), p.method, p.coef))


def refuse_copies(runs: Sequence[FinishedRun]) -> None:
    """Refuse runs of different seeds whose every step is the same: they are one run, and would count as two.

    Runs in which the seed cannot change the batches are let through.
    """
    seen: dict[tuple[float | None, ...], FinishedRun] = {}
    for run in runs:
        numbers = (value for step in run.steps for value in (step.loss, step.cross_entropy, step.grad_norm))
        curve = tuple(value if math.isfinite(value) else None for value in numbers)
        if all(value is None for value in curve) or not run.seed_matters:
            continue
        other = seen.setdefault(curve, run)
        if other.seed != run.seed:
            raise InputError(
                f"{other.folder / STEPS_FILE} and {run.folder / STEPS_FILE} hold the same `loss` and `grad_norm`, bit for bit, "
                f"at all {len(run.steps)} steps, but `seed` is {other.seed} and {run.seed}: one is a copy of the other, or the "
                "seed changes nothing in the loop that made them; remove one."
            )


def _pair(group: Sequence[FinishedRun], by_seed: Mapping[int, FinishedRun]) -> Pairing:
    pairs = tuple((by_seed[run.seed], run) for run in group if run.seed in by_seed)
    return Pairing(tuple(sorted(group, key=lambda run: run.seed)), pairs)


def baseline_runs(runs: Sequence[FinishedRun], name: str | None) -> list[FinishedRun]:
    """The runs of `method` or `method:coef`; the name of a router variant may hold a colon of its own.

    Without a name it is CE, and the token-layer mean among router variants.
    """
    name = name or _usual_baseline(runs)
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
