"""The token table of an audit on disk: parts that are written as the pass proceeds, joined into tokens.parquet at the end.

A part holds the columns of some finished blocks, and Wᵀp of those of their tokens that are in the sample of the geometry figure.
It is written atomically, so a killed audit loses at most one part, and a resumed one skips the parts that are there. Each rank of
a job writes its parts separately; the first rank receives them through the process group. Without a folder the parts stay in
memory. This is the only module that imports pyarrow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zloss import __version__
from zloss.errors import InputError, MissingDependencyError
from zloss.jobs import Job
from zloss.measure.tokens import FLOATS, INTEGERS, Array, Columns, TokenSample, concatenated
from zloss.results.folder import TOKENS_FILE, TOKENS_SCHEMA
from zloss.results.io import unwritable, write_bytes

PARTS_FOLDER = "audit-parts"
SAVE_EVERY_SECONDS = 15.0
"""Seconds between two parts, so a killed audit loses no more work than that; $ZLOSS_SAVE_EVERY overrides it."""
PART_ROWS, ROW_GROUP = 1 << 18, 1 << 17
"""Maximum number of tokens in a saved part, and rows per row group of tokens.parquet."""


class TokenParts:
    """The parts of this process, in the order of the text, and the sample over all their tokens.

    `fingerprint` is the identity of the pass: settings and tokens. The checksum of the model takes seconds, so it is
    computed only when a part is read or written.
    """

    def __init__(
        self,
        folder: Path | None,
        fingerprint: str,
        model: Callable[[], str],
        sample: TokenSample,
        job: Job | None = None,
    ) -> None:
        self.sample, job = sample, job or Job()
        # The blocks of a rank depend on the number of ranks, so parts that were saved with another number do not apply.
        ranks = f"-{job.rank}-of-{job.ranks}" if job.ranks > 1 else ""
        self.folder = None if folder is None else folder / f"{PARTS_FOLDER}{ranks}"
        if self.folder is not None:
            _require_pyarrow()
        # Parts with other columns cannot be joined with those of this pass.
        self._fingerprint = f"{fingerprint} {__version__} {' '.join((*INTEGERS, *FLOATS))}"
        self._model = functools.cache(model)
        self._interval = _interval()
        self._saved_at = time.monotonic()
        self._files: list[Path] = []
        self._pending: list[Columns] = []
        self._pending_span = (0, 0)

    def resume(self, start: int) -> int:
        """The block after the last one in the parts of an earlier audit, whose blocks begin at `start`."""
        for file in sorted(self.folder.glob("part-*.npz")) if self.folder is not None else ():
            first, last, index_S, vectors_SD = self._read(file)
            if first != start:
                break
            self.sample.add(index_S, vectors_SD)
            self._files.append(file)
            start = last
        return start

    def _read(self, file: Path) -> tuple[int, int, Array, Array]:
        """(first block, block after the last, index of the sampled tokens, their vectors) of a part of this audit."""
        try:
            with np.load(file, allow_pickle=False) as archive:
                fingerprint, model = str(archive["fingerprint"]), str(archive["model"])
                first, last = (int(block) for block in archive["span"])
                sample = archive["sample_index"], archive["sample_vectors"]
        except Exception as error:
            raise InputError(f"{file} cannot be read ({error}): delete it, or turn `resume` off.") from error
        if fingerprint != self._fingerprint:
            raise InputError(
                f"{file} belongs to another audit (its model, text, blocks or options differ, "
                "or another version of zloss wrote it): use the same options, or turn `resume` off."
            )
        if model != self._model():
            raise InputError(
                f"{file} belongs to another model: its weights or config differ from the current ones. "
                "Use the model that the audit started with, or turn `resume` off."
            )
        return first, last, *sample

    def add(self, start: int, stop: int, columns: Columns) -> None:
        """Take the columns of the next blocks, start to stop, and write a part when one is due."""
        self._pending_span = (self._pending_span[0] if self._pending else start, stop)
        self._pending.append(columns)
        rows = sum(len(part["block"]) for part in self._pending)
        if time.monotonic() - self._saved_at >= self._interval or rows >= PART_ROWS:
            self.save()

    def save(self) -> None:
        """Write the columns that are not in a part yet."""
        if self.folder is None or not self._pending:
            return
        columns, (start, stop) = concatenated(self._pending), self._pending_span
        size = len(columns["block"]) // (stop - start)
        inside = (self.sample.index_S >= start * size) & (self.sample.index_S < stop * size)
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            "fingerprint": self._fingerprint,
            "model": self._model(),
            "span": np.array([start, stop]),
            "sample_index": self.sample.index_S[inside],
            "sample_vectors": self.sample.vectors_SD[inside],
            **columns,
        }
        np.savez(buffer, **arrays)
        file = self.folder / f"part-{start:09d}-{stop:09d}.npz"
        write_bytes(file, buffer.getvalue())
        self._files.append(file)
        self._pending.clear()
        self._saved_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._files) + len(self._pending)

    def __getitem__(self, place: int) -> Columns:
        if place >= len(self._files):
            return self._pending[place - len(self._files)]
        with np.load(self._files[place], allow_pickle=False) as archive:
            return {name: archive[name] for name in (*INTEGERS, *FLOATS) if name in archive}

    def clear(self) -> None:
        """Delete the files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def gathered_parts(job: Job, parts: TokenParts) -> Iterator[Columns]:
    """The parts of all ranks in the order of the text, on the first rank, where the sample then covers all ranks.

    The other ranks only send theirs.
    """
    for rank, count in enumerate(job.all_gather(len(parts))):
        sample = job.from_rank(rank, (parts.sample.index_S, parts.sample.vectors_SD) if rank == job.rank else None)
        if sample is not None and rank > 0:
            parts.sample.add(*sample)
        for place in range(count):
            part = job.from_rank(rank, parts[place] if rank == job.rank else None)
            if part is not None:
                yield part


class ParquetColumns(Mapping[str, Array]):
    """The columns of a Parquet file, read one at a time."""

    def __init__(self, file: Path, names: tuple[str, ...]) -> None:
        self.file, self._names = file, names

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        from pyarrow import parquet

        column: Array = parquet.read_table(self.file, columns=[name], memory_map=False)[name].to_numpy()
        return column

    def move(self, file: Path) -> None:
        """Move the file into place, replacing an earlier one."""
        with unwritable(str(file)):
            self.file.replace(file)
        self.file = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_parquet(file: Path, parts: Iterator[Columns], facts: Mapping[str, str]) -> ParquetColumns:
    """Write the parts as one Parquet file with row groups of at least `ROW_GROUP` rows (except the last one), and open it.

    `facts` go into the metadata of the file. A column that does not exist for the head is null in every row.
    """
    import pyarrow as pa
    from pyarrow import parquet

    names: tuple[str, ...] = ()
    try:
        with unwritable(str(file)), contextlib.ExitStack() as stack:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(file.open("wb"))
            writer: Any = None
            for group in _row_groups(parts):
                names = tuple(name for name in (*INTEGERS, *FLOATS) if name in group)
                rows, wide = len(group["ce"]), pa.from_numpy_dtype(group["ce"].dtype)
                arrays = {n: pa.array(group[n]) if n in group else pa.nulls(rows, wide) for n in (*INTEGERS, *FLOATS)}
                table = pa.table(arrays, metadata={"schema": TOKENS_SCHEMA, **facts})
                if writer is None:
                    writer = parquet.ParquetWriter(handle, table.schema, use_dictionary=list(INTEGERS))
                writer.write_table(table, row_group_size=rows)
            if writer is not None:
                writer.close()
            handle.flush()
            os.fsync(handle.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            file.parent.rmdir()  # fails if there are parts
        raise
    return ParquetColumns(file, names)


def save_columns(folder: Path, columns: Columns, facts: Mapping[str, str]) -> None:
    """Write columns that are in memory as tokens.parquet of a folder; the file is written atomically."""
    _require_pyarrow()
    place = folder / PARTS_FOLDER
    write_parquet(place / TOKENS_FILE, iter((columns,)), facts).move(folder / TOKENS_FILE)
    place.rmdir()


def _row_groups(parts: Iterator[Columns]) -> Iterator[Columns]:
    """The same rows in fewer, larger parts."""
    held: list[Columns] = []
    for part in parts:
        held.append(part)
        if sum(len(each["block"]) for each in held) >= ROW_GROUP:
            yield concatenated(held)
            held.clear()
    if held:
        yield concatenated(held)


def _interval() -> float:
    """Seconds between two parts, from the environment."""
    value = os.environ.get("ZLOSS_SAVE_EVERY", str(SAVE_EVERY_SECONDS))
    try:
        return float(value)
    except ValueError as error:
        raise InputError(f"ZLOSS_SAVE_EVERY is expected to be a number of seconds, but is {value!r}.") from error


def _require_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingDependencyError("pyarrow", f"writing {TOKENS_FILE}", "audit")
