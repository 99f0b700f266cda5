"""What each row gave (versions, counts, failures, or why it could not be had), and compat.json, which holds the outcomes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from tools.compat.rows import EXTRAS, ROWS, ranges
from tools.compat.selection import FILES

SCHEMA = "zloss.compat/1"


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
class Record:
    """All of compat.json but its schema."""

    stated: dict[str, str]
    """Distribution → the range in pyproject.toml."""
    extras: tuple[str, ...]
    files: int
    """Files and folders of tests in the selection."""
    rows: tuple[Outcome, ...]


def current_record(outcomes: Iterable[Outcome]) -> Record:
    """Outcomes in the order of the rows; of two with the same row the later one."""
    last = {outcome.row: outcome for outcome in outcomes}
    return Record(ranges(), EXTRAS, len(FILES), tuple(last[row.name] for row in ROWS if row.name in last))


def read_record(out: Path) -> Record | None:
    """The record of earlier calls, where there is one."""
    file = out.with_suffix(".json")
    if not file.is_file():
        return None
    read = json.loads(file.read_text(encoding="utf-8"))
    rows = tuple(Outcome(**{**row, "failures": tuple(row["failures"])}) for row in read["rows"])
    return Record(read["stated"], tuple(read["extras"]), read["files"], rows)


def write_record(out: Path, record: Record) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, **asdict(record)}, indent=1, ensure_ascii=False)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


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
