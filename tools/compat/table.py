"""docs/results/compat.md, from compat.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.compat.record import Outcome, Record
from tools.compat.rows import ROWS

HEAD = """# Versions tested

Made by `make compat`. Each row is a new environment with one Python, into which zloss is installed with its extras
`{extras}`; the constraints of the row decide the versions. Then a fixed selection of the tests runs on one
thread of the CPU: {files} files and folders out of every room (`tools/compat/selection.py`). The tables list the versions that
were really installed. The CUDA builds of torch ran without a GPU.
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


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


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
    return f"{markdown(head, lines)}\nSeconds: installation + tests.\n\n{meanings}{not_run}"


def _failures(outcome: Outcome) -> str:
    names = "".join(f"- `{name}`\n" for name in outcome.failures[:10])
    more = len(outcome.failures) - 10
    return f"## Failures of {outcome.row}\n\n{names}" + (f"- and {more} more\n" if more > 0 else "")


def _unavailable(outcomes: Sequence[Outcome]) -> str:
    told = "".join(f"- `{outcome.row}`: {outcome.unavailable}\n" for outcome in outcomes if outcome.unavailable)
    return f"## What could not be had\n\n{told or 'Every row that was run could be had.'}".rstrip() + "\n"


def _skips(outcomes: Sequence[Outcome]) -> str:
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        for reason, tests in outcome.skips.items():
            rows.setdefault(reason, []).append(f"`{outcome.row}` {tests}")
    if not rows:
        return ""
    lines = [(reason, ", ".join(where)) for reason, where in sorted(rows.items())]
    return "## What was skipped\n\n" + markdown(("reason", "row and number of tests"), lines)


def _versions(outcomes: Sequence[Outcome], ranges: Mapping[str, str]) -> str:
    """Every stated dependency with its range and the version of each row."""
    had = [outcome for outcome in outcomes if not outcome.unavailable]
    lines = [
        (f"`{name}`", f"`{stated}`" if stated else "any", *(outcome.installed.get(name, "") for outcome in had))
        for name, stated in ranges.items()
    ]
    head = ("distribution", "stated", *(f"`{outcome.row}`" for outcome in had))
    return "## Installed versions\n\n" + markdown(head, lines)
