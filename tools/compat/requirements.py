"""The ranges that pyproject.toml states, and the oldest version of each."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+?)(?:\[(?P<extras>[\w,-]+)\])?(?P<range>[<>=!~].*)?")


def stated_ranges(pyproject: Path, extras: Iterable[str]) -> dict[str, str]:
    """Name → range, as in `{"torch": ">=2.8"}`, of the required dependencies and of `extras` with the extras they name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found: dict[str, str] = {}
    pending = [*project["dependencies"], *(f"{project['name']}[{extra}]" for extra in extras)]
    while pending:
        stated = pending.pop(0)
        requirement = REQUIREMENT.fullmatch(stated)
        if requirement is None:
            raise ValueError(f"pyproject.toml has a requirement of another form than name[extra]>=version: {stated!r}")
        if requirement["name"] == project["name"]:
            for extra in requirement["extras"].split(","):
                pending += project["optional-dependencies"][extra]
        else:
            found[requirement["name"]] = requirement["range"] or ""
    return found


def floor(version_range: str) -> str | None:
    """The version after `>=`; None where the range states no oldest version."""
    stated = re.search(r">=\s*([\w.]+)", version_range)
    return stated[1] if stated else None


def pinned_versions(constraints: Path) -> dict[str, str]:
    """Name → version of every `name==version` of a constraints file."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return dict(line.strip().split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
