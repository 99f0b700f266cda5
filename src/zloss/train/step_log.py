"""steps.jsonl: one line per optimizer step, written as the run goes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from zloss.errors import InputError, OutputError
from zloss.results.step_record import StepRecord
from zloss.results.writing import write_text

STEPS_FILE = "steps.jsonl"


class StepLog:
    """Starts with the records of the checkpoint a run goes on from: lines of lost steps are dropped."""

    def __init__(self, folder: Path, records: Iterable[StepRecord]) -> None:
        self._path = folder / STEPS_FILE
        write_text(self._path, "".join(record.to_json() + "\n" for record in records))
        self._file = self._path.open("a", encoding="utf-8")

    def append(self, record: StepRecord) -> None:
        """A whole line at once, so that whoever follows the file never reads half of one."""
        try:
            self._file.write(record.to_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror or error}.") from error

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            if error is None:
                raise OutputError(f"cannot write {self._path}: {failure.strerror or failure}.") from failure


def read_steps(folder: Path) -> list[StepRecord]:
    """The records of a run folder."""
    file = folder / STEPS_FILE
    try:
        return [StepRecord.from_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}): remove that run's folder and run it again.") from error
