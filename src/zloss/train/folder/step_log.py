"""steps.jsonl of a run: one line per optimizer step, written as the run goes, and its reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from zloss.errors import InputError, OutputError
from zloss.results.reading import json_lines
from zloss.results.run_metrics import RUN_AGAIN
from zloss.results.step_record import StepRecord
from zloss.results.writing import write_text

STEPS_FILE = "steps.jsonl"


class StepLog:
    """An open steps.jsonl. It starts with the records of the checkpoint that the run goes on from; later lines are dropped."""

    def __init__(self, folder: Path, records: Iterable[StepRecord]) -> None:
        self._path = folder / STEPS_FILE
        write_text(self._path, to_lines(records))
        self._file = self._path.open("a", encoding="utf-8")

    def append(self, record: StepRecord) -> None:
        """Write the line of one step at once, so that a program which follows the file never reads half of it."""
        try:
            self._file.write(to_lines([record]))
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


def to_lines(records: Iterable[StepRecord]) -> str:
    """The records as lines, each ended."""
    return "".join(record.to_json() + "\n" for record in records)


def read_lines(file: Path) -> list[StepRecord]:
    """The records of a file of step lines; a damaged line is named by its number and its key."""
    try:
        lines = json_lines(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}): {RUN_AGAIN}.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(StepRecord.from_json(line))
        except InputError as error:
            raise InputError(f"line {number} of {file} is not a step: {error} To go on, {RUN_AGAIN}.") from error
    return records


def read_steps(folder: Path) -> list[StepRecord]:
    """The steps of a run folder."""
    return read_lines(folder / STEPS_FILE)
