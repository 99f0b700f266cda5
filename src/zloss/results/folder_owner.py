"""Whose results lie in a folder: a result is written over an earlier one of the same subject, never over another's.

A folder has one page, report.html, so it has room for one result of the kinds that have a page.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.errors import OutputError

PAGE_FILE, DECISIONS_FILE, FIGURES = "report.html", "decisions.json", "figures"
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
RECORD_FILES = ("report.json", "implementation_audit.json", "drift.json", "comparison.json", "recommendation.json")
"""Files of the records that have a page."""


@dataclass(frozen=True)
class Owner:
    """What a result is about."""

    kind: str
    """A key of `NAMES`."""
    subject: str = ""
    """The model, the run or the loss, as it was asked for."""
    text: str = ""
    """Name of the text; empty where there is none."""
    place: str = ""
    """`place_of` the model, where it is known: models of one name may lie in different folders."""

    def same(self, other: Owner) -> bool:
        """Whether a later result may take the place of an earlier one."""
        mine, theirs = ((one.kind, Path(one.subject).name, one.text) for one in (self, other))
        return mine == theirs and (self.place == other.place or not self.place or not other.place)

    def __str__(self) -> str:
        subject = Path(self.subject).name
        word = {"loss-audit": "", "recommendation": "for "}.get(self.kind, "of ")
        return NAMES[self.kind] + (f" {word}{subject}" if subject else "") + (f" on {self.text}" if self.text else "")


def place_of(model: str) -> str:
    """A checksum of where a local model lies, which tells nothing of the folders; empty for a name on the hub."""
    path = Path(model)
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16] if path.exists() else ""


def text_name(texts: Sequence[str], corpus: str | None) -> str:
    """The name that a result has for these files or this corpus."""
    return " + ".join(Path(text).name for text in texts) or corpus or "pydoc"


def refuse_other(folder: Path, mine: Owner, *, force: bool = False) -> None:
    """An error where the folder holds a result of something else, unless it may be replaced."""
    for there in [] if force else owners(folder):
        if not there.same(mine):
            which = f"{mine}" if str(mine) != str(there) else "one of another folder with that name"
            raise OutputError(
                f"{folder} holds {there}, and this is {which}: choose another folder, or pass `force` to replace it."
            )


def refuse_strangers(folder: Path, sources: Sequence[Path], *, force: bool = False) -> None:
    """An error where a page of the results `sources` would take the place of another result's page."""
    if force or folder.absolute() in {source.absolute().parent for source in sources}:
        return
    for there in owners(folder):
        raise OutputError(
            f"{folder} holds {there}, which is not among the results given: choose another folder, or pass `force` to "
            "replace it."
        )


def owners(folder: Path) -> list[Owner]:
    """The results in the folder that have a page; a file that is damaged belongs to nobody."""
    return [owner for name in RECORD_FILES if (owner := _owner(folder / name)) is not None]


def remove_leftovers(folder: Path, written: Sequence[Path], figures: Sequence[str] = ()) -> None:
    """Remove what earlier results left in the folder beside those `written` now; `figures` are names of figure files."""
    stale = [folder / name for name in RECORD_FILES if _owner(folder / name) is not None]
    stale += [folder / name for name in (PAGE_FILE, DECISIONS_FILE, "comparison.md")]
    drawn = folder / FIGURES
    stale += [path for path in drawn.rglob("*") if path.name in figures]
    for path in stale:
        if path not in written:
            path.unlink(missing_ok=True)
    for place in sorted((drawn, *drawn.rglob("*")), reverse=True):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def _owner(file: Path) -> Owner | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = str(data.get("schema")).partition("/")[0].removeprefix("zloss.") if isinstance(data, dict) else ""
    if kind not in NAMES:
        return None
    if kind == "loss-audit":
        return Owner(kind, _text(data, "provenance", "loss"))
    if kind == "recommendation":
        return Owner(kind, _text(data, "tested", "model"), _text(data, "tested", "text"))
    if kind == "drift":
        return Owner(kind, _text(data, "model"), _text(data, "corpus"))
    place = _text(data, "model", PLACE_KEY) or _text(data, "model", "extra", PLACE_KEY)
    return Owner(kind, _text(data, "model", "name"), _text(data, "corpus", "name"), place)


def _text(data: Any, *path: str) -> str:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, str) else ""
