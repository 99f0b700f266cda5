"""How a result was produced, in enough detail to reproduce it: one set of keys that audits, runs and reproductions share.

A file or folder is named by the last part of its path, so that no result reveals the folders of a machine: one rule for the
title of a page, report.json, config.json and the recorded command.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from zloss import __version__
from zloss.errors import InputError
from zloss.results.io import read_object, write_json
from zloss.results.record import from_plain, to_plain


def without_folders(name: str) -> str:
    """The last part of a path that exists here; anything else, such as `owner/name` on the hub, is returned unchanged.

    >>> without_folders("owner/name"), without_folders("/")
    ('owner/name', '/')
    """
    try:
        return Path(name).resolve().name or name if name and Path(name).exists() else name
    except OSError:  # a name that no file can have
        return name


def recorded_command(argv: Sequence[str]) -> str:
    """The command line `zloss` + `argv` as results record it: paths by their last part, folders as ./NAME."""
    return shlex.join(["zloss", *map(_last_part, argv)])


def _last_part(argument: str) -> str:
    flag, equals, value = argument.partition("=")
    if flag.startswith("-") and equals:
        return f"{flag}={_last_part(value)}"
    # ./NAME for a folder: a bare NAME would be read as an id on the hub. `owner/name` that is not a path here stays.
    path = Path(argument)
    try:
        if "/" not in argument or not (argument.startswith(("/", ".", "~")) or path.exists()):
            return argument
        return f"./{path.name}" if path.is_dir() else path.name
    except OSError:  # a name that no file can have, or a folder that may not be entered
        return path.name


RUN_FILE = "provenance.json"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The keys that every result has; each kind of result adds its own in a class below."""

    zloss: str
    """Version of zloss."""
    torch: str
    """Version of PyTorch."""
    transformers: str | None = None
    """Version of transformers; None if it was not used."""
    command: str
    """The command line, or the function, that produced the result."""
    started: str
    """Start of the work, ISO 8601 in UTC."""
    seconds: float
    """Wall-clock time of the work, in seconds."""


@dataclass(frozen=True, kw_only=True)
class AuditProvenance(Provenance):
    """`provenance` of an audit's report.json."""

    seed: int
    """Seed of everything that is sampled."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys; `threads` is the number of threads of PyTorch, `row_pass` is as in a run."""


@dataclass(frozen=True, kw_only=True)
class RunProvenance(Provenance):
    """provenance.json of a training run."""

    accelerate: str | None
    """Version of accelerate; None if it is not installed."""
    train_seconds: float
    """Wall-clock time of all optimizer steps, in seconds, those before an interruption included."""
    threads: int
    """Threads of PyTorch."""
    row_pass: Literal["c", "torch"] | None = None
    """What computed exp and sums over rows of logits; "c", a compiled helper with other last digits, or None in older files."""


@dataclass(frozen=True, kw_only=True)
class ReproductionProvenance(Provenance):
    """`provenance` of a reproduction."""

    python: str
    """Version of Python."""
    threads: int
    """Threads of PyTorch."""


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def shared_keys(command: str, started: datetime, seconds: float) -> dict[str, Any]:
    """The keys of `Provenance` for work that began at `started` in this environment."""
    return {
        "zloss": __version__,
        "torch": metadata.version("torch"),
        "transformers": installed_version("transformers"),
        "command": command,
        "started": started.astimezone(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
    }


def write_run_provenance(folder: Path, provenance: RunProvenance) -> None:
    """Write provenance.json into the folder of a run, atomically."""
    write_json(folder / RUN_FILE, to_plain(provenance))


def read_run_provenance(folder: Path) -> RunProvenance:
    """provenance.json of a run's folder; a missing or ill-typed key is named."""
    file = folder / RUN_FILE
    plain = read_object(file, advice="run it again to have one")
    try:
        return from_plain(RunProvenance, plain)
    except InputError as error:
        raise InputError(f"{file} is not readable: {error}") from error
