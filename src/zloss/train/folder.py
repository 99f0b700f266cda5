"""The folder of a run: whose it is, its step log, its checkpoints, its provenance."""

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
"""Folder of the checkpoints inside that of an unfinished run."""
MANIFEST, RECORDS = "manifest.json", "records.jsonl"
KEEP = 2
"""Checkpoints that are kept, the last ones."""
WEIGHTS = "initial_weights"


@contextmanager
def run_in_folder(folder: Path, config: TrainConfig, start: Start, job: Job) -> Iterator[str]:
    """Lock the folder for one run; the value identifies the run. A second process changes nothing in it.

    On several ranks the first one holds the lock; ranks whose model, text or settings differ are refused.
    """
    with ExitStack() as held:

        def claim() -> str:
            settings = config_record(config, start).to_dict()
            if job.first:
                held.enter_context(locked_folder(folder))
                claim_settings(folder, settings)
            return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

        identity = job.together(claim)
        job.together(check_alike, job.all_gather(identity), "models, texts or settings: give every process the same")
        yield identity


def check_alike(of_every_rank: Sequence[object], what: str) -> None:
    """Refuse ranks that differ; `what` completes the sentence."""
    if len(set(of_every_rank)) > 1:
        raise InputError(f"the ranks of the job have different {what}.")


def claim_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write config.json, or refuse a `folder` whose config.json is of another run."""
    refuse_other_settings(folder, settings)
    write_json(folder / CONFIG_FILE, settings)


def check_finished(folder: Path, config: TrainConfig, start: Start) -> None:
    """Check that a finished run has these settings, and remove the checkpoints that a process killed at the very end left."""
    with locked_folder(folder):
        claim_settings(folder, config_record(config, start).to_dict())
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def refuse_other_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuse a `folder` that holds a run with another setting, other data or other initial weights."""
    before = earlier_settings(folder)
    mine = json.loads(json.dumps(settings))
    names = [] if before is None else [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
    if names:
        raise InputError(
            f"{folder} contains a run with other settings ({', '.join(sorted(names))} differ): "
            "choose another folder, or remove that one."
        )


def earlier_settings(folder: Path) -> dict[str, Any] | None:
    """config.json of the run in `folder`; None if there is none, or only an unreadable one without metrics.

    Metrics of a finished run without a readable config.json are an error: their settings are unknown, so they are neither
    reused nor overwritten.
    """
    try:
        return read_object(folder / CONFIG_FILE, advice=RUN_AGAIN)
    except InputError as error:
        if (folder / METRICS_FILE).exists():
            raise InputError(f"{folder} contains a finished run whose settings are unknown: {error}") from error
        return None


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


class SavedState:
    """The checkpoints of an unfinished run in its folder; the last two are kept.

    accelerate writes model and optimizer into a temporary folder. The step records and a manifest with the checksum of every
    file are added, and a rename puts the folder in place, so a checkpoint is complete or absent. Loading verifies the
    checksums: if a file was truncated, the checkpoint before it is used. On several ranks the first one writes and all of
    them read. A checkpoint holds nothing that depends on the number of ranks.
    """

    def __init__(self, folder: Path, identity: str, job: Job) -> None:
        self._folder = folder / CHECKPOINTS
        self._identity, self._job = identity, job
        self.step = 0
        """The last step that was saved or loaded."""

    def save(self, accelerator: Any, step: int, records: list[StepRecord]) -> None:
        """Write the state after `step`; if the disk is full, the earlier checkpoints stay."""
        if not self._job.first:
            return
        try:
            with whole_folder(self._folder / f"step-{step:07d}") as part:
                accelerator.save_state(str(part))
                (part / RECORDS).write_text(_lines(records), encoding="utf-8")
                files = {file.name: _checksum(file) for file in sorted(part.iterdir())}
                content = json.dumps({"step": step, "identity": self._identity, "files": files})
                (part / MANIFEST).write_text(content, encoding="utf-8")
        except UnwritableFolderError as error:
            raise OutputError(
                f"cannot write a checkpoint into {self._folder}: {first_line(error.__cause__ or error)}. Free some space and "
                "run the same command again: it resumes from the last complete checkpoint."
            ) from error
        self.step = step
        for old in self._steps()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self, accelerator: Any) -> tuple[int, list[StepRecord]]:
        """Load the newest intact checkpoint: (its step, the records up to it), or (0, []) without one."""
        for place in reversed(self._steps()):
            manifest = self._manifest(place)
            if manifest is None:
                if self._job.first:
                    print(
                        f"{place.name} is damaged or of another run: the checkpoint before it is used.", file=sys.stderr
                    )
                continue
            accelerator.load_state(str(place))
            self.step = int(manifest["step"])
            return self.step, read_steps(place, RECORDS)
        return 0, []

    def clear(self) -> None:
        """Remove all checkpoints: the run is finished."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*"))

    def _manifest(self, place: Path) -> dict[str, Any] | None:
        """The manifest of a checkpoint of this run whose files have their checksums; None otherwise."""
        try:
            manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            int(manifest["step"])
            files: dict[str, str] = manifest["files"]
            intact = all(_checksum(place / name) == checksum for name, checksum in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # truncated, or JSON of another shape
            return None
        return manifest if intact and manifest.get("identity") == self._identity else None


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


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
