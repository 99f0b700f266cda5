"""Finished runs: read from their folders, checked, and paired with the baseline's run of the same seed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.results.io import read_object
from zloss.results.provenance import RunProvenance, read_run_provenance
from zloss.results.record import from_plain
from zloss.results.run_config import (
    CONFIG_FILE,
    FREE,
    FREE_MOE,
    FREE_RECORDED,
    MATCHED,
    OFF,
    REFERENCE,
    UNPENALIZED,
    RecordedRun,
    RunConfig,
    TrainConfig,
    router_name,
    run_name,
    variants,
)
from zloss.results.run_metrics import METRICS_FILE, RUN_AGAIN, RunMetrics, read_metrics
from zloss.results.steps import StepRecord
from zloss.train.folder import STEPS_FILE, WEIGHTS, read_steps
from zloss.train.loss import method_names

RECORDS: dict[str, type[TrainConfig] | type[RecordedRun]] = {
    RunConfig.SCHEMA: TrainConfig,
    RecordedRun.SCHEMA: RecordedRun,
}
"""The record of each schema of config.json; it checks types and ranges, and ignores keys of other versions."""
REQUIRED = {"method", "coef", "seed"}
"""Keys of every config.json of a run."""


@dataclass(frozen=True)
class FinishedRun:
    """config.json, metrics.json and provenance.json of one folder."""

    folder: Path
    config: dict[str, Any]
    """config.json: every field of the run's `TrainConfig`, with texts and models by name."""
    record: RunMetrics
    """metrics.json."""
    provenance: RunProvenance | None = None
    """provenance.json; None if the folder has no readable one."""

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The numbers of `record` under their flat keys in metrics.json, for code that visits all of them."""
        return self.record.to_dict()

    @property
    def model(self) -> str | None:
        """Name of the model that the run started from; None for a run of another loop, which records only a class."""
        if self.moe is not None:
            return "a mixture of experts from scratch"
        if self.config.get("from_config") is not None:
            return f"{self.config['from_config']} from scratch"
        return None if self.recorded else self.config.get("model")

    @cached_property
    def steps(self) -> list[StepRecord]:
        """The records of steps.jsonl; an error if they are not all steps of the run, from the first to the last."""
        records = read_steps(self.folder)
        wanted = int(self.config.get("steps") or self.record.training.steps)
        whole = len(records) == wanted and all(record.step == i for i, record in enumerate(records, start=1))
        if not whole or wanted != self.record.training.steps:
            raise InputError(
                f"{self.folder / STEPS_FILE} holds {len(records)} lines, but the run has {wanted} steps and its metrics cover "
                f"{self.record.training.steps}: {RUN_AGAIN}."
            )
        return records

    @property
    def moe(self) -> dict[str, Any] | None:
        """The experts' part of config.json; None for a dense run."""
        return self.config.get("moe")

    @property
    def method(self) -> str:
        """The method; of a run with experts the router variant, with the method of its head where that is not CE."""
        method = str(self.config["method"])
        if self.moe is None:
            return method
        router = str(self.moe["router"])
        return router if method == "ce" else f"{router} + {method} {self.config['coef']:g}"

    @property
    def coef(self) -> float:
        """λ of the method, or λ_R of the router variant."""
        return float(self.config["coef"] if self.moe is None else self.moe["router_coef"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def key(self) -> tuple[str, float]:
        """(method, coefficient): runs that share it differ in their seed alone."""
        return self.method, self.coef

    @property
    def recorded(self) -> bool:
        """Whether the run was recorded from another loop."""
        return self.config.get("schema") == RecordedRun.SCHEMA

    @property
    def seed_matters(self) -> bool:
        """False if the seed can only change dropout: the weights are given and every step trains on all blocks."""
        if self.recorded or self.moe is not None or self.config.get("from_config") is not None:
            return True
        try:
            per_step = self.config["micro_batch"] * self.config["accumulate"]
            return bool(per_step % self.config["data"]["train"]["blocks"])
        except (KeyError, TypeError, ZeroDivisionError):
            return True

    def experiment(self) -> dict[str, Any]:
        """Every field that must agree between compared runs, flat; runs are paired by their seed."""
        flat, free = _flat(self.config).items(), (*FREE, "seed", *(FREE_RECORDED if self.recorded else ()))
        return {key: value for key, value in flat if key.split(".")[0] not in free and key not in FREE_MOE}


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`; the error of a missing or damaged file names it and its key."""
    config = read_object(folder / CONFIG_FILE, advice=RUN_AGAIN)
    try:
        if missing := sorted(REQUIRED - config.keys()):
            raise InputError(f"`{missing[0]}` is missing.")
        if str(config.get("schema")) not in RECORDS:
            raise InputError(f"`schema` is expected to be {' or '.join(RECORDS)}, but is {config.get('schema')!r}.")
        from_plain(RECORDS[config["schema"]], config)
    except InputError as error:
        raise InputError(f"{folder / CONFIG_FILE} is not a run config: {error} To continue, {RUN_AGAIN}.") from error
    record = read_metrics(folder)
    _check_names(folder, config, record)
    try:
        provenance = read_run_provenance(folder)
    except InputError:
        # It only says how the numbers were produced: a comparison does not need it.
        provenance = None
    return FinishedRun(folder, config, record, provenance)


def _check_names(folder: Path, config: dict[str, Any], record: RunMetrics) -> None:
    """Reject a folder whose metrics.json, or whose name, is of another method, coefficient or seed than its config.json."""
    moe, routing = config.get("moe"), record.routing
    pairs = [(key, getattr(record, key), key, config[key]) for key in ("method", "coef", "seed")]
    if moe is not None and routing is not None:
        pairs.append(("router.variant", routing.router.variant, "moe.router", moe["router"]))
        pairs.append(("router.coef", routing.router.coef, "moe.router_coef", moe["router_coef"]))
    for key, value, of_config, expected in pairs:
        if value != expected:
            raise InputError(
                f"`{key}` of {folder / METRICS_FILE} is expected to be {expected!r}, as `{of_config}` of {CONFIG_FILE} is, "
                f"but is {value!r}: {RUN_AGAIN}."
            )
    router = None if moe is None else router_name(moe["router"], moe["router_coef"])
    name = run_name(config["method"], config["coef"], config["seed"], router)
    # The name of a folder says nothing about its run unless `zloss train` or `record_run` chose it.
    names = (*method_names(), *(variant.replace(":", "-") for variant in variants()))
    part = rf"(?:{'|'.join(map(re.escape, names))})-[0-9.e+-]+"
    if folder.name != name and re.fullmatch(rf"{part}(?:-{part})?-s\d+", folder.name):
        raise InputError(
            f"{folder} is named for a different run than its {CONFIG_FILE} describes (`method` {config['method']!r}, "
            f"`coef` {config['coef']!r}, `seed` {config['seed']}): its name is expected to be {name}; rename it, or "
            f"{RUN_AGAIN}."
        )


def load_runs(folder: Path) -> tuple[list[FinishedRun], list[str]]:
    """(finished runs in a folder of runs, names of unfinished ones), sorted by name."""
    if not folder.is_dir():
        raise InputError(
            f"folder {folder} does not exist: pass the output folder of `zloss train` or of recorded runs."
        )
    runs, unfinished = [], []
    for place in sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}")):
        if not read_object(place / CONFIG_FILE, advice=RUN_AGAIN).keys() >= REQUIRED:
            continue  # not a run
        if (place / METRICS_FILE).is_file():
            runs.append(read_run(place))
            _ = runs[-1].steps  # rejected here, before anything is compared
        else:
            unfinished.append(place.name)
    if not runs and (folder / METRICS_FILE).is_file():
        raise InputError(f"{folder} is one run: pass the folder that contains it and the runs to compare it with.")
    if not runs:
        raise InputError(
            f"{folder} contains no finished run of `zloss train` or `zloss.record_run`, which is a folder with a {METRICS_FILE}."
        )
    return runs, unfinished


def check_pair(baseline: FinishedRun, run: FinishedRun) -> None:
    """Reject a pair that differs in anything but the method, naming the first fields that differ."""
    mine, theirs = run.experiment(), baseline.experiment()
    if run.seed == baseline.seed:
        # Weights of a model from scratch follow the seed: they have to agree between the runs of one seed.
        mine, theirs = (one | {WEIGHTS: other.config.get(WEIGHTS)} for one, other in ((mine, run), (theirs, baseline)))
    differing = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    if differing:
        shown = ", ".join(f"{key} ({theirs.get(key)!r} → {mine.get(key)!r})" for key in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"{baseline.folder.name} and {run.folder.name} are not a matched pair: they differ in {shown}{more}. "
            f"Only the {'router variant, ' if run.moe else ''}method, its coefficient, target and β may differ."
        )


def _check_settings(first: FinishedRun, run: FinishedRun) -> None:
    """Reject runs of one method and coefficient that differ in other settings: they are not seeds of one experiment."""
    for key in () if run.method in UNPENALIZED else ("target", "coef_until", "gain_beta"):
        if first.config.get(key) != run.config.get(key):
            raise InputError(
                f"{first.folder.name} and {run.folder.name} are seeds of the same method and coefficient, but differ in {key} "
                f"({first.config.get(key)!r} → {run.config.get(key)!r}): put them in separate folders."
            )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


@dataclass(frozen=True)
class Pairing:
    """The runs of one method and coefficient, by seed."""

    runs: tuple[FinishedRun, ...]
    pairs: tuple[tuple[FinishedRun, FinishedRun], ...]
    """(baseline, run) of every seed that the baseline has."""

    @property
    def key(self) -> tuple[str, float]:
        """Method and coefficient."""
        return self.runs[0].key


def pair_runs(runs: Sequence[FinishedRun], base: Sequence[FinishedRun]) -> list[Pairing]:
    """One pairing per method and coefficient, the baseline first; runs of another experiment are rejected."""
    _refuse_copies(runs)
    by_seed = {run.seed: run for run in base}
    groups: dict[tuple[str, float], dict[int, FinishedRun]] = {}
    for run in runs:
        # Means over seeds are of one experiment, even if a run has no partner.
        check_pair(base[0], run)
        if run.seed in by_seed:
            check_pair(by_seed[run.seed], run)
        group = groups.setdefault(run.key, {})
        _check_settings(next(iter(group.values()), run), run)
        same = group.setdefault(run.seed, run)
        if same is not run:
            raise InputError(
                f"{same.folder.name} and {run.folder.name} are the same run (method, coefficient and seed): remove one."
            )
    pairings = []
    for group in groups.values():
        ordered = tuple(group[seed] for seed in sorted(group))
        pairs = tuple((by_seed[seed], run) for seed, run in group.items() if seed in by_seed)
        pairings.append(Pairing(ordered, pairs))
    return sorted(pairings, key=lambda p: (p.key != base[0].key, p.key[0] not in (*UNPENALIZED, OFF), p.key))


def _refuse_copies(runs: Sequence[FinishedRun]) -> None:
    """Reject runs of different seeds whose every step is the same: they are one run, and would count as two.

    Runs in which the seed cannot change the batches are accepted.
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
                "seed changes nothing in the loop that produced them; remove one."
            )


def baseline_runs(runs: Sequence[FinishedRun], name: str | None) -> list[FinishedRun]:
    """The runs of `method` or `method:coef`; the name of a router variant may hold a colon too.

    Without a name it is CE, and the token-layer mean among router variants.
    """
    if name is None:
        routed = any(run.moe is not None for run in runs)
        name = "ce" if not routed else REFERENCE if any(run.method == REFERENCE for run in runs) else OFF
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
        raise InputError(f"no run uses the baseline {name!r}: expected one of {known}.")
    coefs = sorted({run.coef for run in found})
    if len(coefs) > 1:
        raise InputError(
            f"the baseline {name!r} was run with several coefficients: "
            f"name one of {', '.join(f'{method}:{coef:g}' for coef in coefs)}."
        )
    return found
