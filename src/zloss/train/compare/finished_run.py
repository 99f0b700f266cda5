"""A finished run as `zloss compare` reads it from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.errors import InputError
from zloss.results.moe_config import FREE_MOE
from zloss.results.train_config import FREE


@dataclass(frozen=True)
class FinishedRun:
    """config.json and metrics.json of one folder."""

    folder: Path
    config: dict[str, Any]
    metrics: dict[str, Any]

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
        """What makes two runs the same method: its name and coefficient."""
        return self.method, self.coef

    def experiment(self) -> dict[str, Any]:
        """Every field that must agree between compared runs, flat; runs are paired by their seed."""
        flat, free = _flat(self.config).items(), (*FREE, "seed")
        return {key: value for key, value in flat if key.split(".")[0] not in free and key not in FREE_MOE}


def load_runs(folder: Path) -> tuple[list[FinishedRun], list[str]]:
    """(finished runs in a folder of runs, names of unfinished ones), in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: pass the --out of `zloss train`.")
    runs, unfinished = [], []
    for place in sorted(path.parent for path in folder.glob("*/config.json")):
        config = _read(place / "config.json")
        if not {"method", "coef", "seed"} <= config.keys():
            continue
        if (place / "metrics.json").is_file():
            metrics = _read(place / "metrics.json")
            if "heads" not in metrics:
                raise InputError(
                    f"{place / 'metrics.json'} is not of `zloss train`: remove that folder and run it again."
                )
            runs.append(FinishedRun(place, config, metrics))
        else:
            unfinished.append(place.name)
    if not runs:
        raise InputError(f"{folder} holds no finished run of `zloss train`: expected folders with a metrics.json.")
    return runs, unfinished


def check_pair(baseline: FinishedRun, run: FinishedRun) -> None:
    """Refuse a pair that differs in anything but the method, naming the first fields that differ."""
    mine, theirs = run.experiment(), baseline.experiment()
    differing = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    if differing:
        shown = ", ".join(f"{key} ({theirs.get(key)!r} → {mine.get(key)!r})" for key in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"{baseline.folder.name} and {run.folder.name} are not a matched pair: they differ in {shown}{more}. "
            f"Only the {'router variant, ' if run.moe else ''}method, its coefficient, target and β may differ."
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): remove that run's folder and run it again.") from error
    if not isinstance(data, dict):
        raise InputError(f"{file} is expected to hold an object, but holds a {type(data).__name__}.")
    return data


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
