"""The rows: which Python, and which dependencies at their oldest stated or at their pinned version. All others are the newest."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERY = "*"
"""Instead of names: every dependency that pyproject.toml states a range for."""
EXTRAS = ("train", "integrations", "triton")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
"""Taken out of the extra `dev`; its formatters, type checker and site are not part of what users run."""


@dataclass(frozen=True)
class Row:
    """One environment."""

    name: str
    python: str
    """As in "3.11"."""
    what: str
    oldest: tuple[str, ...] = ()
    """Dependencies at the oldest version that pyproject.toml states."""
    pinned: tuple[str, ...] = ()
    """Dependencies at the version of constraints.txt."""


ROWS = (
    Row("pinned", "3.11", "the versions of constraints.txt, with which `make test` runs: the control", pinned=(EVERY,)),
    Row("oldest", "3.11", "every dependency at its oldest stated version", oldest=(EVERY,)),
    Row(
        "oldest-torch",
        "3.11",
        # The interpreter of Triton 3.4, which torch 2.8 brings, takes arrays of one element for scalars; numpy 2.4 does not.
        "the oldest torch, and the oldest numpy, because Triton 3.4 cannot interpret with numpy 2.4; "
        "all else the newest that fits",
        oldest=("torch", "numpy"),
    ),
    Row(
        "oldest-transformers",
        "3.11",
        "the oldest transformers with the torch of constraints.txt, all else the newest that fits",
        oldest=("transformers",),
        pinned=("torch",),
    ),
    Row("newest-3.11", "3.11", "the newest of everything"),
    Row("newest-3.12", "3.12", "the newest of everything"),
    Row("newest-3.13", "3.13", "the newest of everything"),
)


def ranges(root: Path = ROOT) -> dict[str, str]:
    """Name → stated range of all that a row installs."""
    tools = stated_ranges(root / "pyproject.toml", ("dev",))
    return stated_ranges(root / "pyproject.toml", EXTRAS) | {name: tools[name] for name in TEST_TOOLS}


def constraints(row: Row, root: Path = ROOT) -> dict[str, str]:
    """Name → the one version that a row allows; dependencies that are not named are free."""
    stated, pins = ranges(root), pinned_versions(root / "constraints.txt")
    floors = {name: found for name, spec in stated.items() if (found := floor(spec))}

    def chosen(names: tuple[str, ...], versions: dict[str, str]) -> dict[str, str]:
        return versions if EVERY in names else {name: versions[name] for name in names}

    return chosen(row.oldest, floors) | chosen(row.pinned, pins)


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


PIN = re.compile(r"(?P<name>[\w.-]+)(?:>=[\w.]+,<|=)=(?P<version>[\w.]+)")


def pinned_versions(constraints: Path) -> dict[str, str]:
    """Name → version of every `name==version` of a constraints file; of a range, its newest version (`name>=…,<=version`)."""
    found = (PIN.fullmatch(line.strip()) for line in constraints.read_text(encoding="utf-8").splitlines())
    return {pin["name"]: pin["version"] for pin in found if pin is not None}
