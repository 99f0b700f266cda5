"""The folder of a run: which run it belongs to, its step log, its checkpoints, its provenance."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zloss.distributed import first_rank
from zloss.errors import InputError, OutputError, UnwritableFolderError, first_line
from zloss.jobs import Job
from zloss.models.checkpoint import weight_fingerprint
from zloss.results.folder import locked_folder, whole_folder
from zloss.results.io import json_lines, read_object, write_json, write_text
from zloss.results.provenance import RunProvenance, installed_version, shared_keys
from zloss.results.run_config import CONFIG_FILE, RunConfig, TrainConfig, without_paths
from zloss.results.run_metrics import METRICS_FILE, RUN_AGAIN
from zloss.results.steps import StepRecord

if TYPE_CHECKING:
    from zloss.train.start import Start

STEPS_FILE = "steps.jsonl"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints, inside the folder of an unfinished run."""
CHECKSUMS, RECORDS = "checksums.json", "records.jsonl"
KEEP = 2
"""How many of the most recent checkpoints are kept."""
WEIGHTS = "initial_weights"


@contextmanager
def run_in_folder(folder: Path, config: TrainConfig, start: Start, job: Job) -> Iterator[None]:
    """Lock the folder for one run. A second process changes nothing in it.

    On several ranks the first one holds the lock; ranks whose model, text or settings differ are rejected.
    """
    with ExitStack() as held:

        def claim() -> str:
            settings = config_record(config, start).to_dict()
            if job.first:
                held.enter_context(locked_folder(folder))
                claim_settings(folder, settings)
            return json.dumps(settings, sort_keys=True)

        settings = job.together(claim)
        job.together(check_alike, job.all_gather(settings), "models, texts or settings: give every process the same")
        yield


def check_alike(of_every_rank: Sequence[object], what: str) -> None:
    """Reject ranks that differ; `what` completes the sentence."""
    if len(set(of_every_rank)) > 1:
        raise InputError(f"the ranks of the job have different {what}.")


def claim_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write config.json, or reject a `folder` whose config.json belongs to another run."""
    refuse_other_settings(folder, settings)
    write_json(folder / CONFIG_FILE, settings)


def check_finished(folder: Path, config: TrainConfig, start: Start) -> None:
    """Check that a finished run has these settings, and remove the checkpoints that a process killed at the very end left."""
    with locked_folder(folder):
        claim_settings(folder, config_record(config, start).to_dict())
        remove_checkpoints(folder)


def refuse_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Reject a `folder` that holds a run with another setting, other data or other initial weights.

    A folder without a readable config.json is accepted unless it has metrics: the settings of that finished run are unknown, so
    it is neither reused nor overwritten.
    """
    try:
        before = read_object(folder / CONFIG_FILE, advice=RUN_AGAIN)
    except InputError as error:
        if (folder / METRICS_FILE).exists():
            raise InputError(f"{folder} contains a finished run whose settings are unknown: {error}") from error
        return
    mine = json.loads(json.dumps(settings))
    names = sorted(key for key in {**before, **mine} if before.get(key) != mine.get(key))
    if names:

        def shown(key: str) -> str:
            values = before.get(key), mine.get(key)
            plain = not any(isinstance(value, (dict, list)) for value in values) and key != WEIGHTS
            return f"`{key}`: {values[0]} there, {values[1]} here" if plain else f"`{key}` differs"

        raise InputError(
            f"{folder} contains a run with other settings ({'; '.join(map(shown, names))}): choose another folder (`out` of "
            "`zloss train`), or remove that one."
        )


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the metrics of a finished run and the line of every step that its config.json states."""
    if not (folder / METRICS_FILE).is_file():
        return False
    try:
        steps = read_object(folder / CONFIG_FILE, advice=RUN_AGAIN).get("steps")
        return bool((folder / STEPS_FILE).read_bytes().count(b"\n") == steps)
    except (OSError, InputError):
        return False


def config_record(config: TrainConfig, start: Start) -> RunConfig:
    """config.json of a run: its settings without paths of this machine, its data, and the weights it starts from."""
    return RunConfig(
        config=without_paths(config),
        data=start.data.identity,
        initial_weights=weight_fingerprint(start.checkpoint.model) if config.pretrained else "seed",
    )


def write_steps(folder: Path, records: Iterable[StepRecord]) -> None:
    """Begin steps.jsonl with the records of the checkpoint that a run resumes from; later lines are dropped."""
    write_text(folder / STEPS_FILE, _lines(records))


def append_step(folder: Path, record: StepRecord) -> None:
    """Write the line of one step at once, so that a program that follows the file never reads half of it."""
    file = folder / STEPS_FILE
    try:
        with file.open("a", encoding="utf-8") as log:
            log.write(_lines([record]))
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}.") from error


def _lines(records: Iterable[StepRecord]) -> str:
    """One JSON line per record."""
    return "".join(record.to_json() + "\n" for record in records)


def read_steps(folder: Path, name: str = STEPS_FILE) -> list[StepRecord]:
    """The step records in a file of `folder`; a damaged line is named by its number and its key."""
    file = folder / name
    try:
        lines = json_lines(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): {RUN_AGAIN}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(StepRecord.from_json(line))
        except InputError as error:
            raise InputError(f"line {number} of {file} is not a step: {error} To continue, {RUN_AGAIN}.") from error
    return records


# Checkpoints of an unfinished run, the last two. accelerate writes model and optimizer into a temporary folder; the step
# records and the checksums of every file and of the run's config.json are added, and a rename puts the folder in place, so a
# checkpoint is complete or absent, and a checkpoint of another run is never loaded. It holds nothing that depends on the number
# of ranks: the first one writes it and all of them read it.


def save_checkpoint(folder: Path, accelerator: Any, records: Sequence[StepRecord]) -> None:
    """Write the state after the last of `records`; if the disk is full, the earlier checkpoints stay."""
    place = folder / CHECKPOINTS / f"step-{len(records):07d}"
    try:
        with whole_folder(place) as part:
            accelerator.save_state(str(part))
            (part / RECORDS).write_text(_lines(records), encoding="utf-8")
            (part / CHECKSUMS).write_text(json.dumps(_checksums(part)), encoding="utf-8")
    except UnwritableFolderError as error:
        raise OutputError(
            f"cannot write a checkpoint into {place.parent}: {first_line(error.__cause__ or error)}. Free some space and "
            "run the same command again: it resumes from the last complete checkpoint."
        ) from error
    for old in sorted(place.parent.glob("step-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, accelerator: Any) -> list[StepRecord]:
    """Load the newest checkpoint whose files have their checksums; the records up to it, none without a checkpoint."""
    for place in sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True):
        try:
            saved = json.loads((place / CHECKSUMS).read_text(encoding="utf-8"))
            # Extra files, such as those of a file manager or a network drive, do no harm.
            intact = isinstance(saved, dict) and RECORDS in saved and saved.items() <= _checksums(place).items()
        except (OSError, ValueError):
            intact = False
        if intact:
            accelerator.load_state(str(place))
            return read_steps(place, RECORDS)
        if first_rank():
            print(
                f"{place.name} is damaged or belongs to another run: the checkpoint before it is used.", file=sys.stderr
            )
    return []


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints: the run is finished."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _checksums(place: Path) -> dict[str, str]:
    """File name → SHA-256, of the files of a checkpoint and of config.json of its run."""
    found = {}
    for file in (*sorted(place.iterdir()), place.parent.parent / CONFIG_FILE):
        if file.name != CHECKSUMS:
            with file.open("rb") as content:
                found[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def run_provenance(command: str, began: float, records: Sequence[StepRecord]) -> RunProvenance:
    """Versions, command and time of a run that (last) began at `began`, in seconds since the epoch, and has just ended.

    They are in a separate file because metrics.json must not depend on them.
    """
    return RunProvenance(
        **shared_keys(command, datetime.fromtimestamp(began, UTC), time.time() - began),
        accelerate=installed_version("accelerate"),
        train_seconds=sum(record.seconds or 0.0 for record in records),
        threads=torch.get_num_threads(),
        row_pass="torch",
    )
