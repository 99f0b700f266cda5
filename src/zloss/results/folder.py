"""The folder results are written to: writable, held by one process at a time, never that of another result.

The lock is the system's own (flock) on a small file in the folder, so it ends with the process that holds it. A folder has one
page, report.html, so it has room for one result of the kinds that have a page. A folder that is written as a whole is
filled next to its place, then renamed onto it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.errors import InputError, OutputError, UnwritableFolderError, ZlossError
from zloss.results.io import (
    SUFFIX,
    part_prefix,
    remove_abandoned,
    share,
    take_lock,
    unwritable,
    why_not_written,
)


def check_folder(folder: Path) -> None:
    """An error, before the work starts, where results could not be written to `folder`."""
    with unwritable(f"to {folder}"):
        existing = folder
        while not _exists(existing):
            existing = existing.parent
        if not existing.is_dir():
            raise UnwritableFolderError(
                f"cannot write to {folder}: {existing} is not a writable folder. Choose another folder."
            )
        # A new file with an unpredictable name, so that nobody can have placed a link there.
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".zloss-") as probe:
            probe.write(b"0")
            probe.flush()


def _exists(path: Path) -> bool:
    """Whether there is something at `path`; an error where the system cannot tell, as for a name that is too long."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


LOCK_FILE = ".zloss-lock"
"""Contains the process id of its holder; removed when the holder exits normally."""

LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Neither a link nor a pipe that somebody planted under the name is followed or waited for."""
_ATTEMPTS = 1000
"""How often to recreate the folder if other processes remove it, empty, at the same moment."""


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` inside the block; an error names the process that holds it, if there is one.

    The folder is created if it does not exist, and removed again if the block leaves it empty.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / LOCK_FILE
    with unwritable(f"to {folder}"):
        handle = _locked(folder)
    try:
        yield
    finally:
        # Before the release, and only our own file: the block may have replaced the folder, which another process may hold.
        with contextlib.suppress(OSError):
            if os.path.samestat(file.lstat(), os.fstat(handle)):
                file.unlink()
        os.close(handle)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _locked(folder: Path) -> int:
    """The open and held lock file of `folder`; on a file system without locks, it locks nothing."""
    for attempt in range(_ATTEMPTS):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK_FILE, LOCK_FLAGS, 0o666)
        except (FileNotFoundError, FileExistsError):
            # Its last holder removed the folder: before the file was opened, or before mkdir could see that what exists is one.
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        try:
            if not take_lock(handle):
                raise InputError(
                    f"{folder} is in use by {_holder(folder / LOCK_FILE)}: wait for it to finish, or choose another folder."
                )
            if os.fstat(handle).st_nlink > 0:
                _sign(handle, folder)
                return handle
            # Its last holder removed the file before we had the lock.
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise InputError(
        f"{folder} is in use by another process of zloss: wait for it to finish, or choose another folder."
    )


def _sign(handle: int, folder: Path) -> None:
    """Write our process id into a lock file that is new or was left by a killed process; another file is not written to."""
    status = os.fstat(handle)
    plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if not plain or not re.fullmatch(rb"\d*\n?", os.read(handle, 64)):
        raise UnwritableFolderError(
            f"cannot write to {folder}: the file {LOCK_FILE} in it is a link, or was not made by zloss. Choose another folder."
        )
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, f"{os.getpid()}\n".encode())


def _holder(file: Path) -> str:
    with contextlib.suppress(OSError):
        if (pid := file.read_text(encoding="ascii", errors="replace").strip()).isdecimal():
            return f"another process of zloss (pid {pid})"
    return "another process of zloss"


PAGE_FILE, DECISIONS_FILE, FIGURES = "report.html", "decisions.json", "figures"
TEXT_FILE = "comparison.md"
"""The page of a comparison as Markdown."""
TOKENS_FILE, TOKENS_SCHEMA = "tokens.parquet", "zloss.tokens/1"
"""The token table of an audit."""
PAGE_MARK = " · zloss</title>"
"""How the title of a page ends."""
FORMATS = ("svg", "png")
FIGURE_NAMES = ("gradient_geometry", "tails", "spectrum", "drift_source", "drift_transport")
"""Names of the figure files, without their formats."""
PLACE_KEY = "place"
"""The key of `place_of` among the facts of a model."""
NAMES = {
    "audit": "an audit",
    "loss-audit": "an audit of the loss",
    "implementation-audit": "an implementation audit",
    "drift": "a drift",
    "comparison": "a comparison of training runs",
    "recommendation": "a recommendation",
}
"""Kind, as a schema names it → what it is called in an error."""
RECORD_OF = {
    "audit": "report.json",
    "loss-audit": "report.json",
    "implementation-audit": "implementation_audit.json",
    "drift": "drift.json",
    "comparison": "comparison.json",
    "recommendation": "recommendation.json",
}
"""Kind → the file of its record."""
RECORD_FILES = tuple(dict.fromkeys(RECORD_OF.values()))
"""Files of the records that have a page."""
OWNED_BY = {
    "loss-audit": ("provenance.loss", ""),
    "recommendation": ("tested.model", "tested.text"),
    "drift": ("model", "corpus"),
}
"""Kind → the keys of its subject and its text, where they are not those of an audit."""


@dataclass(frozen=True)
class Owner:
    """What a result is about."""

    kind: str
    """A key of `NAMES`."""
    subject: str = ""
    """The model, the run or the loss, as requested."""
    text: str = ""
    """Name of the text; empty if there is none."""
    place: str = ""
    """`place_of` the model, where it is known: models of one name may lie in different folders."""

    def same(self, other: Owner) -> bool:
        """Whether a later result may replace an earlier one."""
        mine, theirs = ((one.kind, Path(one.subject).name, one.text) for one in (self, other))
        return mine == theirs and (self.place == other.place or not self.place or not other.place)

    def __str__(self) -> str:
        subject = Path(self.subject).name
        word = {"loss-audit": "", "recommendation": "for "}.get(self.kind, "of ")
        return NAMES[self.kind] + (f" {word}{subject}" if subject else "") + (f" on {self.text}" if self.text else "")


def place_of(model: str) -> str:
    """A checksum of a local model's path, which does not reveal the folders; empty for a name on the Hub."""
    path = Path(model)
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16] if path.exists() else ""


def text_name(texts: Sequence[str], corpus: str | None) -> str:
    """The name that a result has for these files or this corpus."""
    return " + ".join(Path(text).name for text in texts) or corpus or "pydoc"


def refuse_other(folder: Path, mine: Owner, *, force: bool = False) -> None:
    """An error if the folder holds a result of something else, or a file of somebody else that this one would replace or
    remove, unless it may be replaced."""
    if force:
        return
    for there in owners(folder):
        if not there.same(mine):
            which = f"{mine}" if str(mine) != str(there) else "one of another folder with that name"
            raise OutputError(
                f"{folder} holds {there}, and this is {which}: choose another folder, or pass `force` to replace it."
            )
    _refuse_foreign(folder, [folder / RECORD_OF[mine.kind], *_shared_files(folder)])


def refuse_unrelated_page(folder: Path, sources: Sequence[Path], *, force: bool = False) -> None:
    """An error if a page of the results `sources` would replace another result's page, or a file of somebody else."""
    if force:
        return
    if folder.absolute() in {source.absolute().parent for source in sources}:
        _refuse_foreign(folder, [folder / PAGE_FILE, folder / DECISIONS_FILE])
        return
    for there in owners(folder):
        raise OutputError(
            f"{folder} holds {there}, which is not among the results given: choose another folder, or pass `force` to "
            "replace it."
        )
    _refuse_foreign(folder, _shared_files(folder))


def _refuse_foreign(folder: Path, files: Sequence[Path]) -> None:
    """An error that names those of the `files` in the folder that zloss did not write.

    Text and pictures do not say who wrote them: they are ours next to a record or a page of ours.
    """
    ours = {file for file in files if written_kind(file) in (*NAMES, "decisions", "tokens", "page")}
    alone = not ours and not owners(folder)
    foreign = [
        str(file.relative_to(folder))
        for file in files
        if file.is_file() and file not in ours and (alone or file.suffix in (".json", ".html", ".parquet"))
    ]
    if foreign:
        names, one = " and ".join(foreign), len(foreign) == 1
        raise OutputError(
            f"{folder} holds {names}, which {'is not a result' if one else 'are not results'} of zloss: choose another folder, "
            f"or pass `force` to replace {'it' if one else 'them'}."
        )


def _shared_files(folder: Path) -> list[Path]:
    """What a result may replace or remove in the folder besides records, whichever result wrote it."""
    figures = [f"{name}.{suffix}" for name in FIGURE_NAMES for suffix in FORMATS]
    drawn = [path for path in sorted((folder / FIGURES).rglob("*")) if path.name in figures]
    return [*(folder / name for name in (PAGE_FILE, DECISIONS_FILE, TOKENS_FILE, TEXT_FILE)), *drawn]


def written_kind(file: Path) -> str:
    """What a file of zloss holds: the kind that its schema names, or "page"; empty for any other file."""
    try:
        if file.suffix == ".json":
            data = json.loads(file.read_text(encoding="utf-8"))
            name, slash, _ = str(data.get("schema") if isinstance(data, dict) else "").partition("/")
            return name.removeprefix("zloss.") if slash and name.startswith("zloss.") else ""
        with file.open("rb") as content:
            start = content.read(_MARKED)
            content.seek(-min(_MARKED, file.stat().st_size), os.SEEK_END)
            end = content.read()
    except (OSError, ValueError, RecursionError):
        return ""
    if file.suffix == ".parquet":
        return "tokens" if TOKENS_SCHEMA.encode() in end else ""
    return "page" if PAGE_MARK.encode() in start else ""


_MARKED = 65536
"""Bytes at the start of a page that hold its title, and at the end of a token table that hold its schema."""


def owners(folder: Path) -> list[Owner]:
    """The results in the folder that have a page; unreadable files are ignored."""
    return [owner for name in RECORD_FILES if (owner := _owner(folder / name)) is not None]


def remove_leftovers(folder: Path, written: Sequence[Path]) -> None:
    """Remove the records, pages and figures of earlier results that were not `written` now, so that two results are never
    mixed."""
    stale = [folder / name for name in RECORD_FILES if _owner(folder / name) is not None]
    for path in (*stale, *_shared_files(folder)):
        if path not in written:
            path.unlink(missing_ok=True)
    drawn = folder / FIGURES
    for place in sorted((drawn, *drawn.rglob("*")), reverse=True):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _owner(file: Path) -> Owner | None:
    kind = written_kind(file)
    if kind not in NAMES:
        return None
    data = json.loads(file.read_text(encoding="utf-8"))
    subject, text = OWNED_BY.get(kind, ("model.name", "corpus.name"))
    return Owner(kind, _text(data, subject), _text(data, text), _text(data, f"model.{PLACE_KEY}"))


def _text(data: Any, path: str) -> str:
    """The text at a dotted path; empty if there is none."""
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, str) else ""


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill; when the block ends it is synced and moved to `target`, replacing an earlier one.

    When the block raises, it is removed and `target` stays as it was; a failed write, also one of safetensors, tokenizers
    or torch, is an `OutputError`. Folders that killed processes left half filled are removed first.
    """
    with unwritable(str(target)):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent)
        scratch = _new_part(target)
        handle = os.open(scratch, os.O_RDONLY)
    try:
        take_lock(handle)
        yield scratch
        for path in (scratch, *scratch.rglob("*")):
            share(path)
            if path.is_file():
                with path.open("rb") as content:
                    os.fsync(content.fileno())
        _move(scratch, target)
    except ZlossError:
        raise
    except Exception as error:
        reason = why_not_written(error)
        if reason is None:
            raise
        raise UnwritableFolderError(f"cannot write {target}: {reason}. Choose another folder.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(handle)


def _new_part(target: Path) -> Path:
    """An empty folder next to `target`."""
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=part_prefix(target.name), suffix=SUFFIX))


def _move(scratch: Path, target: Path) -> None:
    """Rename; an earlier folder is moved aside first, because a folder cannot be renamed onto a filled one."""
    if not target.exists():
        scratch.rename(target)
        return
    aside = _new_part(target)
    try:
        target.rename(aside / target.name)
        try:
            scratch.rename(target)
        except OSError:
            (aside / target.name).rename(target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
