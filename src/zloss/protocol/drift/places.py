"""The checkpoints that were asked for, in the order of the steps that their names state."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from zloss.errors import CheckpointError, InputError
from zloss.models.checkpoint import check_not_adapter
from zloss.protocol.drift.config import DriftConfig

_STEP = re.compile(r"(?:step|steps|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Place:
    """Where one checkpoint lies."""

    name: str
    """Name of the folder, or the revision."""
    step: int
    model: str
    """Folder or Hugging Face id."""
    revision: str | None = None


def find_places(config: DriftConfig) -> list[Place]:
    """At least two places with distinct steps, sorted by step."""
    if not config.checkpoints:
        raise InputError(
            "`checkpoints` is expected to name folders of checkpoints, or a Hugging Face id with `revisions`."
        )
    places = (
        _revisions(config) if config.revisions else [place for name in config.checkpoints for place in _folders(name)]
    )
    places.sort(key=lambda place: place.step)
    for before, after in itertools.pairwise(places):
        if before.step == after.step:
            raise InputError(
                f"`checkpoints` has two of step {before.step}, {before.model} and {after.model}: leave one out."
            )
    if len(places) < 2:
        found = f"only {places[0].name} was found" if places else "none was found"
        raise InputError(f"`checkpoints` is expected to name at least two checkpoints of one run, but {found}.")
    return places


def step_of(name: str) -> int | None:
    """The step in a name: the number behind `step`, `iter` or `checkpoint`, else the last number; None without one.

    >>> step_of("checkpoint-1000"), step_of("stage1-step500-tokens2B"), step_of("0042"), step_of("final")
    (1000, 500, 42, None)
    """
    named = _STEP.search(name)
    if named is not None:
        return int(named[1])
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def run_name(config: DriftConfig, places: list[Place]) -> str:
    """The hub id, or the folder that holds the checkpoints, by its last part."""
    if config.revisions:
        return config.checkpoints[0]
    parents = {Path(place.model).absolute().parent.name for place in places}
    return parents.pop() if len(parents) == 1 else "checkpoints"


def _revisions(config: DriftConfig) -> list[Place]:
    if len(config.checkpoints) != 1:
        raise InputError(
            f"`revisions` belongs to one Hugging Face id, but `checkpoints` names {len(config.checkpoints)}."
        )
    (model,) = config.checkpoints
    if Path(model).is_dir():
        raise InputError(f"`revisions` belongs to a Hugging Face id, but {model} is a folder.")
    return [Place(name, _step(name), model, name) for name in config.revisions]


def _folders(name: str) -> list[Place]:
    """The folder itself, or the checkpoints inside it where it holds some."""
    folder = Path(name)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {name}: a Hugging Face id needs `revisions`.")
    children = [child for child in sorted(folder.iterdir()) if child.is_dir() and step_of(child.name) is not None]
    inside = [child for child in children if (child / CONFIG_FILE).is_file()]
    if inside:
        return [_place(child) for child in inside]
    for place in (folder, *children):
        check_not_adapter(str(place))
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{name} is no checkpoint and holds none: expected {CONFIG_FILE} in it or in folders inside."
        )
    return [_place(folder)]


def _place(folder: Path) -> Place:
    check_not_adapter(str(folder))
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(f"{folder} has no weights: expected .safetensors files in it.")
    return Place(folder.absolute().name, _step(folder.absolute().name), str(folder))


def _step(name: str) -> int:
    step = step_of(name)
    if step is None:
        raise InputError(
            f"`checkpoints` needs a step in every name, but {name!r} has no number: rename it or leave it out."
        )
    return step
