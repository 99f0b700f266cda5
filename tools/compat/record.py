"""The outcome of each row (versions, counts, failures, or why it is unavailable), compat.json, and the page made from it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from tools.compat.rows import EXTRAS, ROWS, ranges
from tools.compat.selection import FILES
from tools.docs.markdown import table

SCHEMA = "zloss.compat/1"


@dataclass(frozen=True)
class Outcome:
    """One row of the table, as in compat.json."""

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
    def verdict(self) -> Literal["green", "red", "unavailable"]:
        if self.unavailable:
            return "unavailable"
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
    """Everything in compat.json except its schema."""

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


def with_counts(outcome: Outcome, junit: Path) -> Outcome:
    """The outcome with the counts of a file that `pytest --junitxml` wrote."""
    passed, failures, skips = 0, [], {}
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failures.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = without_places(skip.get("message") or "no reason")
            skips[reason] = skips.get(reason, 0) + 1
        else:
            passed += 1
    counts = {"passed": passed, "failed": len(failures), "skipped": sum(skips.values())}
    return replace(outcome, **counts, failures=tuple(failures), skips=skips)


def installer_reason(said: str) -> str:
    """The lines in which pip or uv says why it cannot install, without places of this machine or of an index."""
    lines = [line.strip() for line in said.splitlines()]
    reasons = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if "The conflict is caused by:" in lines:
        begin = lines.index("The conflict is caused by:") + 1
        end = next((i for i in range(begin, len(lines)) if not lines[i]), len(lines))
        reasons = [*lines[begin:end], *(line for line in reasons if "conflicting dependencies" in line)]
    elif any(line.startswith("cause:") for line in lines):  # uv
        begin = next(i for i, line in enumerate(lines) if line.startswith("cause:"))
        reasons = [" ".join(lines[begin:]).removeprefix("cause:").strip()]
    reasons = reasons or [line for line in lines if line][-1:] or ["the installer gave no reason"]
    return "; ".join(map(without_places, reasons))


def without_places(text: str) -> str:
    """A sentence without addresses and absolute paths, which belong to this machine."""
    text = re.sub(r"\s*@?\s*\b(?:https?|file)://\S+", "", text)
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+([\w.+-]+)", r"\1", text)


# The page

HEAD = """# Versions tested

Which versions of Python and of the dependencies zloss was tested with (`make compat`). Each row is a fresh environment with zloss
and its extras `{extras}`, in which a fixed selection of the tests ran on one CPU thread: {files} files and
folders from every package (`tools/compat/selection.py`). The tables list the versions that were installed. The CUDA
builds of torch ran without a GPU.
"""
SHOWN = ("torch", "transformers")


def page(record: Record) -> str:
    """The page with all tables."""
    parts = [
        HEAD.format(extras=",".join(record.extras), files=record.files),
        _rows(record.rows),
        *(_failures(outcome) for outcome in record.rows if outcome.failures),
        _unavailable(record.rows),
        _skips(record.rows),
        _versions(record.rows, record.stated),
    ]
    return "\n".join(part for part in parts if part)


def _rows(outcomes: Sequence[Outcome]) -> str:
    lines = [
        (
            f"`{outcome.row}`",
            outcome.python,
            *(outcome.installed.get(name, "") for name in SHOWN),
            f"**{outcome.verdict}**" if outcome.verdict != "green" else "green",
            *(("", "", "") if outcome.unavailable else map(str, (outcome.passed, outcome.failed, outcome.skipped))),
            "" if outcome.unavailable else f"{outcome.install_seconds:.0f} + {outcome.test_seconds:.0f}",
            outcome.commit,
        )
        for outcome in outcomes
    ]
    head = ("row", "Python", *SHOWN, "verdict", "passed", "failed", "skipped", "seconds", "commit")
    done = {outcome.row for outcome in outcomes}
    left = [f"`{row.name}` ({row.what})" for row in ROWS if row.name not in done]
    not_run = f"\nNot run yet: {', '.join(left)}.\n" if left else ""
    meanings = "".join(f"- `{outcome.row}`: {outcome.what}\n" for outcome in outcomes)
    return f"{table(head, lines)}\n\nSeconds: installation + tests.\n\n{meanings}{not_run}"


def _failures(outcome: Outcome) -> str:
    names = "".join(f"- `{name}`\n" for name in outcome.failures[:10])
    more = len(outcome.failures) - 10
    return f"## Failures of {outcome.row}\n\n{names}" + (f"- and {more} more\n" if more > 0 else "")


def _unavailable(outcomes: Sequence[Outcome]) -> str:
    reasons = "".join(f"- `{outcome.row}`: {outcome.unavailable}\n" for outcome in outcomes if outcome.unavailable)
    return f"## Unavailable\n\n{reasons or 'No row was unavailable.'}".rstrip() + "\n"


def _skips(outcomes: Sequence[Outcome]) -> str:
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        for reason, tests in outcome.skips.items():
            rows.setdefault(reason, []).append(f"`{outcome.row}` {tests}")
    if not rows:
        return ""
    lines = [(reason, ", ".join(where)) for reason, where in sorted(rows.items())]
    return "## Skipped tests\n\n" + table(("reason", "row and number of tests"), lines) + "\n"


def _versions(outcomes: Sequence[Outcome], ranges: Mapping[str, str]) -> str:
    """Every stated dependency with its range and the version of each row."""
    had = [outcome for outcome in outcomes if not outcome.unavailable]
    lines = [
        (f"`{name}`", f"`{stated}`" if stated else "any", *(outcome.installed.get(name, "") for outcome in had))
        for name, stated in ranges.items()
    ]
    head = ("distribution", "stated", *(f"`{outcome.row}`" for outcome in had))
    return "## Installed versions\n\n" + table(head, lines) + "\n"
