"""A finished run as its folder holds it, and which runs may be compared."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.objectives import objective_names
from zloss.results.moe_config import FREE_MOE, router_name, variants
from zloss.results.provenance import RunProvenance, read_run_provenance
from zloss.results.reading import read_object
from zloss.results.record import from_plain
from zloss.results.recorded_run import FREE_RECORDED, RecordedRun
from zloss.results.run_config import CONFIG_FILE, RunConfig
from zloss.results.run_metrics import METRICS_FILE, RUN_AGAIN, RunMetrics, read_metrics
from zloss.results.step_record import StepRecord
from zloss.results.train_config import FREE, TrainConfig, run_name
from zloss.train.folder.step_log import STEPS_FILE, read_steps

START = "initial_weights"


@dataclass(frozen=True)
class _RouterKeys:
    """What a comparison reads of the experts' part of config.json."""

    router: str
    router_coef: float
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _RunKeys:
    """What a comparison reads of config.json by name; the other keys are only compared."""

    method: str
    coef: float
    seed: int
    steps: int | None = None
    moe: _RouterKeys | None = None
    schema: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FinishedRun:
    """config.json, metrics.json and provenance.json of one folder."""

    folder: Path
    config: dict[str, Any]
    """config.json: every field of the run's `TrainConfig`, with texts and models by name."""
    record: RunMetrics
    """metrics.json."""
    provenance: RunProvenance | None = None
    """provenance.json; None where the folder has no readable one."""

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The numbers of `record` under their flat keys in metrics.json, for what walks over all of them."""
        return self.record.to_dict()

    @property
    def model(self) -> str | None:
        """Name of the model that the run began with; None for a run by other hands, which records a class alone."""
        if self.config.get("schema") == RecordedRun.SCHEMA:
            return None
        if self.moe is not None:
            return "a mixture of experts from scratch"
        if self.config.get("from_config") is not None:
            return f"{self.config['from_config']} from scratch"
        name = self.config.get("model")
        return name if isinstance(name, str) else None

    @cached_property
    def steps(self) -> list[StepRecord]:
        """The records of steps.jsonl; an error where they are not the run's steps, from the first to the last."""
        records = read_steps(self.folder)
        wanted = int(self.config.get("steps") or self.record.training.steps)
        whole = len(records) == wanted and all(record.step == i for i, record in enumerate(records, start=1))
        if not whole or wanted != self.record.training.steps:
            raise InputError(
                f"{self.folder / STEPS_FILE} holds {len(records)} lines, but the run has {wanted} steps and its metrics are "
                f"of {self.record.training.steps}: {RUN_AGAIN}."
            )
        return records

    @property
    def moe(self) -> dict[str, Any] | None:
        """The experts' part of config.json; None for a dense run."""
        found = self.config.get("moe")
        return found if isinstance(found, dict) else None

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
        """Whether another loop made the run."""
        return self.config.get("schema") == RecordedRun.SCHEMA

    @property
    def seed_matters(self) -> bool:
        """False where the seed can only change dropout: the weights are given and every step trains on all blocks."""
        config = self.config
        if self.recorded or self.moe is not None or config.get("from_config") is not None:
            return True
        try:
            blocks, per_step = config["data"]["train"]["blocks"], config["micro_batch"] * config["accumulate"]
            return bool(per_step % blocks)
        except (KeyError, TypeError, ZeroDivisionError):
            return True

    def experiment(self) -> dict[str, Any]:
        """Every field that must agree between compared runs, flat; runs are paired by their seed."""
        flat, free = _flat(self.config).items(), (*FREE, "seed", *(FREE_RECORDED if self.recorded else ()))
        return {key: value for key, value in flat if key.split(".")[0] not in free and key not in FREE_MOE}


def read_run(folder: Path) -> FinishedRun:
    """The finished run in `folder`; a file that is missing or damaged is named, with its key."""
    config = read_object(folder / CONFIG_FILE, advice=RUN_AGAIN)
    try:
        from_plain(_RunKeys, config)
        # The records check their own ranges. A key that only another version has is left aside.
        if config.get("schema") == RunConfig.SCHEMA:
            from_plain(TrainConfig, config)
        elif config.get("schema") == RecordedRun.SCHEMA:
            from_plain(RecordedRun, config)
    except InputError as error:
        raise InputError(
            f"{folder / CONFIG_FILE} is not the config of a run: {error} To go on, {RUN_AGAIN}."
        ) from error
    record = read_metrics(folder)
    run = FinishedRun(folder, config, record)
    _check_names(run)
    try:
        provenance = read_run_provenance(folder)
    except InputError:
        # It says how the numbers were made and changes none of them: a comparison does without it.
        provenance = None
    return replace(run, provenance=provenance)


def _check_names(run: FinishedRun) -> None:
    """Refuse a folder whose metrics.json, or whose name, is of another method, coefficient or seed than its config.json."""
    moe, routing = run.moe, run.record.routing
    pairs = [(key, getattr(run.record, key), key, run.config[key]) for key in ("method", "coef", "seed")]
    if moe is not None and routing is not None:
        pairs.append(("router.variant", routing.router.variant, "moe.router", moe["router"]))
        pairs.append(("router.coef", routing.router.coef, "moe.router_coef", moe["router_coef"]))
    for key, value, of_config, expected in pairs:
        if value != expected:
            raise InputError(
                f"`{key}` of {run.folder / METRICS_FILE} is expected to be {expected!r}, as `{of_config}` of {CONFIG_FILE} is, "
                f"but is {value!r}: {RUN_AGAIN}."
            )
    name = run_name(
        run.config["method"],
        run.config["coef"],
        run.seed,
        None if moe is None else router_name(moe["router"], moe["router_coef"]),
    )
    if run.folder.name != name and _is_run_name(run.folder.name):
        raise InputError(
            f"{run.folder} has the name of another run than its {CONFIG_FILE} describes (`method` {run.config['method']!r}, "
            f"`coef` {run.config['coef']!r}, `seed` {run.seed}): its name is expected to be {name}; rename it, or {RUN_AGAIN}."
        )


def _is_run_name(name: str) -> bool:
    """Whether a folder has a name as `zloss train` and `record_run` give it; other names say nothing about the run."""
    names = (*objective_names(), *(variant.replace(":", "-") for variant in variants()))
    part = rf"(?:{'|'.join(map(re.escape, names))})-[0-9.e+-]+"
    return re.fullmatch(rf"{part}(?:-{part})?-s\d+", name) is not None


def load_runs(folder: Path) -> tuple[list[FinishedRun], list[str]]:
    """(finished runs in a folder of runs, names of unfinished ones), in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: pass the output folder of `zloss train` or of recorded runs.")
    runs, unfinished = [], []
    for place in sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}")):
        if not {"method", "coef", "seed"} <= read_object(place / CONFIG_FILE, advice=RUN_AGAIN).keys():
            continue  # not a run
        if (place / METRICS_FILE).is_file():
            runs.append(read_run(place))
            _ = runs[-1].steps  # refused here, before anything is compared
        else:
            unfinished.append(place.name)
    if not runs and (folder / METRICS_FILE).is_file():
        raise InputError(f"{folder} is one run: pass the folder that holds it and the runs it is compared with.")
    if not runs:
        raise InputError(f"{folder} holds no finished run: expected folders with a {METRICS_FILE}.")
    return runs, unfinished


def check_pair(baseline: FinishedRun, run: FinishedRun) -> None:
    """Refuse a pair that differs in anything but the method, naming the first fields that differ."""
    mine, theirs = run.experiment(), baseline.experiment()
    if run.seed == baseline.seed:
        # Weights of a model from scratch follow the seed: they have to agree between the runs of one seed.
        mine, theirs = (one | {START: other.config.get(START)} for one, other in ((mine, run), (theirs, baseline)))
    differing = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    if differing:
        shown = ", ".join(f"{key} ({theirs.get(key)!r} → {mine.get(key)!r})" for key in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"{baseline.folder.name} and {run.folder.name} are not a matched pair: they differ in {shown}{more}. "
            f"Only the {'router variant, ' if run.moe else ''}method, its coefficient, target and β may differ."
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
