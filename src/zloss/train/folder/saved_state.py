"""Checkpoints of an unfinished run; the last two are kept.

accelerate writes model and optimizer into a temporary folder. The step records and a manifest with the checksum of every file
are added, and a rename puts the folder in its place, so a checkpoint is whole or not there. Loading verifies the checksums: where
a file was cut off, the checkpoint before it is used. Of several ranks the first one writes; all of them read. A checkpoint holds
nothing that depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from zloss.distributed import Job
from zloss.errors import OutputError
from zloss.results.step_record import StepRecord
from zloss.train.folder.step_log import read_lines, to_lines

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints inside that of an unfinished run."""
MANIFEST, RECORDS = "manifest.json", "records.jsonl"
KEEP = 2


class SavedState:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, identity: str, job: Job) -> None:
        self._folder = folder / CHECKPOINTS
        self._identity, self._job = identity, job

    def save(self, accelerator: Any, step: int, records: list[StepRecord]) -> None:
        """Write the state after `step`; where the disk is full, the earlier checkpoints stay."""
        if not self._job.first:
            return
        place = self._folder / f"step-{step:07d}"
        part = self._folder / f".{place.name}.part"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            accelerator.save_state(str(part))
            (part / RECORDS).write_text(to_lines(records), encoding="utf-8")
            files = {file.name: _checksum(file) for file in sorted(part.iterdir())}
            for name in files:
                _sync(part / name)
            content = json.dumps({"step": step, "identity": self._identity, "files": files})
            (part / MANIFEST).write_text(content, encoding="utf-8")
            _sync(part / MANIFEST)
            if place.exists():
                shutil.rmtree(place)
            part.rename(place)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise _not_written(self._folder, error) from error
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            if type(error).__module__.startswith("safetensors"):
                raise _not_written(self._folder, error) from error
            raise
        for old in self._steps()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self, accelerator: Any) -> tuple[int, list[StepRecord]]:
        """(last finished step, its records) from the newest sound checkpoint, with the state loaded; (0, []) without one."""
        for place in reversed(self._steps()):
            manifest = self._sound(place)
            if manifest is None:
                if self._job.first:
                    told = f"{place.name} is damaged or of another run: the checkpoint before it is used."
                    print(told, file=sys.stderr)
                continue
            accelerator.load_state(str(place))
            return int(manifest["step"]), read_lines(place / RECORDS)
        return 0, []

    def clear(self) -> None:
        """Remove all checkpoints: the run is finished."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _steps(self) -> list[Path]:
        return sorted(self._folder.glob("step-*")) if self._folder.is_dir() else []

    def _sound(self, place: Path) -> dict[str, Any] | None:
        """The manifest of a checkpoint of this run whose files have their checksums; None otherwise."""
        try:
            manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            int(manifest["step"])
            files: dict[str, str] = manifest["files"]
            sound = all(_checksum(place / name) == checksum for name, checksum in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut off, or JSON of another shape
            return None
        return manifest if sound and manifest.get("identity") == self._identity else None


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(file: Path) -> None:
    with file.open("rb") as content:
        os.fsync(content.fileno())


def _not_written(folder: Path, error: Exception) -> OutputError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0][:120]
    return OutputError(
        f"cannot write a checkpoint into {folder}: {reason}. Free some space and run the same command again: "
        "it goes on from the last whole checkpoint."
    )
