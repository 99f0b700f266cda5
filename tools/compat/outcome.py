"""What a row gave: versions, counts, failures, or the reason why it could not be had."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """One row of the table, as it stands in compat.json."""

    row: str
    python: str
    what: str
    commit: str
    unavailable: str = ""
    """Why the environment could not be made; empty where the tests ran."""
    installed: dict[str, str] = field(default_factory=dict)
    """Version of every distribution in the environment."""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    skips: dict[str, int] = field(default_factory=dict)
    """Reason of a skip → number of tests."""
    install_seconds: float = 0.0
    test_seconds: float = 0.0

    @property
    def verdict(self) -> Literal["green", "red", "could not be had"]:
        if self.unavailable:
            return "could not be had"
        return "red" if self.failed or not self.passed else "green"

    @property
    def summary(self) -> str:
        """One line for the terminal."""
        if self.unavailable:
            return self.unavailable
        shown = ", ".join(f"{name} {self.installed.get(name, '?')}" for name in ("torch", "transformers"))
        return (
            f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped in {self.test_seconds:.0f} s ({shown})"
        )


@dataclass(frozen=True)
class Counts:
    """The counts of one pytest run."""

    passed: int
    failures: tuple[str, ...]
    skips: dict[str, int]


def read_counts(junit: Path) -> Counts:
    """The counts of a file that `pytest --junitxml` wrote."""
    passed, failures, skips = 0, [], {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = without_places(skip.get("message") or "no reason")
            skips[reason] = skips.get(reason, 0) + 1
        else:
            passed += 1
    return Counts(passed, tuple(failures), skips)


def installer_reason(said: str) -> str:
    """The lines in which pip or uv says why it cannot install, without places of this machine or of an index."""
    lines = [line.strip() for line in said.splitlines()]
    told = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if "The conflict is caused by:" in lines:
        begin = lines.index("The conflict is caused by:") + 1
        end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
        told = [*lines[begin:end], *(line for line in told if "conflicting dependencies" in line)]
    elif any(line.startswith("cause:") for line in lines):  # uv
        begin = next(i for i, line in enumerate(lines) if line.startswith("cause:"))
        told = [" ".join(lines[begin:]).removeprefix("cause:").strip()]
    told = told or [line for line in lines if line][-1:] or ["the installer gave no reason"]
    return "; ".join(map(without_places, told))


def without_places(text: str) -> str:
    """A sentence without addresses and absolute paths, whose place is the machine and not the table."""
    text = re.sub(r"\s*@?\s*\b(?:https?|file)://\S+", "", text)
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text)
