"""The rows of `make compat`: constraints out of pyproject.toml, counts out of pytest's file, one table."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.compat.interpreters import interpreter
from tools.compat.outcome import Outcome, installer_reason, read_counts, without_places
from tools.compat.record import SCHEMA, Record, current_record, read_record, write_record
from tools.compat.requirements import floor, pinned_versions, stated_ranges
from tools.compat.rows import EVERY, ROOT, ROWS, Row, constraints, ranges
from tools.compat.selection import DESELECTED, FILES
from tools.compat.table import page

PYPROJECT = """
[project]
name = "made"
dependencies = ["torch>=2.8", "numpy>=1.26"]
[project.optional-dependencies]
one = ["made[two]", "rich>=13,<15"]
two = ["free"]
"""
GREEN = Outcome(
    "a", "3.11.7", "the control", "abc", installed={"torch": "2.13.0+cpu"}, passed=7, skipped=1, test_seconds=3
)


def made(folder: Path, text: str = PYPROJECT) -> Path:
    file = folder / "pyproject.toml"
    file.write_text(text)
    return file


def test_ranges_follow_extras_into_extras(tmp_path: Path) -> None:
    assert stated_ranges(made(tmp_path), ()) == {"torch": ">=2.8", "numpy": ">=1.26"}
    assert stated_ranges(made(tmp_path), ("one",)) == {
        "torch": ">=2.8",
        "numpy": ">=1.26",
        "rich": ">=13,<15",
        "free": "",
    }


def test_a_requirement_of_another_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torch @ somewhere"):
        stated_ranges(made(tmp_path, PYPROJECT.replace("torch>=2.8", "torch @ somewhere")), ())


@pytest.mark.parametrize(("stated", "oldest"), [(">=2.8", "2.8"), (">=13,<15", "13"), ("<2,>=1.6", "1.6"), ("", None)])
def test_the_floor_of_a_range(stated: str, oldest: str | None) -> None:
    assert floor(stated) == oldest


def test_a_row_has_the_floors_and_pins_it_names() -> None:
    stated, pins = ranges(), pinned_versions(ROOT / "constraints.txt")
    mixed = constraints(Row("x", "3.11", "", oldest=("transformers",), pinned=("torch",)))
    assert mixed == {"transformers": floor(stated["transformers"]), "torch": pins["torch"]}
    assert constraints(Row("x", "3.11", "")) == {}
    oldest = constraints(Row("x", "3.11", "", oldest=(EVERY,)))
    assert oldest.keys() == stated.keys()


def test_every_stated_dependency_has_a_floor() -> None:
    assert not [name for name, spec in ranges().items() if floor(spec) is None]


def test_a_python_is_stated_once_a_row_on_it_is_green() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    committed = read_record(ROOT / "docs/results/compat")
    assert committed is not None
    green = {".".join(one.python.split(".")[:2]) for one in committed.rows if one.verdict == "green"}
    assert set(re.findall(r"Python :: (3\.\d+)", text)) == green
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_selection_exists_and_has_every_room() -> None:
    assert not [file for file in (*FILES, *DESELECTED) if not (ROOT / file.partition("::")[0]).exists()]
    rooms = {path.name for path in (ROOT / "src/zloss").iterdir() if (path / "__init__.py").is_file()}
    selected = {file.split("/")[1] for file in FILES}
    assert rooms - selected == set()


def test_counts_come_from_the_file_of_pytest(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.a.test_b" name="test_c[1]"><failure message="no"/></testcase>'
        '<testcase classname="tests.a.test_b" name="test_d"><error message="no"/></testcase>'
        '<testcase classname="tests.a.test_b" name="test_e"/>'
        '<testcase classname="tests.a.test_b" name="test_f"><skipped message="needs /opt/x/gpu"/></testcase>'
        "</testsuite></testsuites>"
    )
    counts = read_counts(junit)
    assert counts.passed == 1
    assert counts.failures == ("tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_d")
    assert counts.skips == {"needs gpu": 1}


def test_the_installers_reason_names_no_place() -> None:
    conflict = (
        "ERROR: Cannot install zloss[train]==0.3 because these package versions have conflicting dependencies.\n"
        "\nThe conflict is caused by:\n    zloss[train] 0.3 depends on numpy>=2 @ file:///home/me/zloss\n"
        "    The user requested (constraint) numpy==1.26\n\nTo fix this you could try to:\n1. loosen\n"
    )
    reason = installer_reason(conflict)
    assert reason.startswith("zloss[train] 0.3 depends on numpy>=2; The user requested (constraint) numpy==1.26; ")
    missing = "Looking in indexes: https://index.example/simple\nERROR: No matching distribution found for torch==2.8\n"
    assert installer_reason(missing) == "No matching distribution found for torch==2.8"
    unsolved = "error: No solution found\n  cause: Because trl==1.16 depends on accelerate>=1.10.1\n    you lose.\n"
    assert installer_reason(unsolved) == "Because trl==1.16 depends on accelerate>=1.10.1 you lose."
    assert (
        without_places("from /home/me/zloss/constraints.txt and https://index.example/x") == "from constraints.txt and"
    )


def test_a_row_without_a_passed_test_is_not_green() -> None:
    assert GREEN.verdict == "green"
    assert replace(GREEN, failed=1).verdict == "red"
    assert replace(GREEN, passed=0).verdict == "red"
    assert replace(GREEN, unavailable="no Python 3.19").verdict == "could not be had"


def test_the_page_says_what_failed_and_what_could_not_be_had() -> None:
    red = replace(GREEN, row="b", failed=12, failures=tuple(f"test_{i}" for i in range(12)), skips={"no triton": 3})
    none = Outcome("c", "3.19", "a Python to come", "abc", unavailable="This machine has no Python 3.19.")
    text = page(Record({"torch": ">=2.8", "numpy": ""}, ("train",), 3, (GREEN, red, none)))
    assert "| `a` | 3.11.7 | 2.13.0+cpu |  | green | 7 | 0 | 1 | 0 + 3 | abc |" in text
    assert "- `a`: the control\n" in text
    assert "## Failures of b" in text
    assert "- `test_9`\n- and 2 more" in text
    assert "- `c`: This machine has no Python 3.19." in text
    assert "| no triton | `b` 3 |" in text
    assert "| `torch` | `>=2.8` | 2.13.0+cpu | 2.13.0+cpu |" in text


def test_records_are_read_back(tmp_path: Path) -> None:
    record = Record({"torch": ">=2.8"}, ("train",), 3, (GREEN, replace(GREEN, row="b", failed=1, failures=("test_x",))))
    assert read_record(tmp_path / "compat") is None
    write_record(tmp_path / "compat", record)
    assert read_record(tmp_path / "compat") == record
    assert json.loads((tmp_path / "compat.json").read_text())["schema"] == SCHEMA


def test_a_new_outcome_takes_the_place_of_the_old_one() -> None:
    names = [row.name for row in ROWS[:3]]
    old = current_record(replace(GREEN, row=name) for name in names)
    new = current_record([*old.rows, replace(GREEN, row=names[1], passed=9)])
    assert [(outcome.row, outcome.passed) for outcome in new.rows] == [(names[0], 7), (names[1], 9), (names[2], 7)]


def test_an_interpreter_is_found_or_not() -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    assert interpreter(here) == sys.executable
    assert interpreter("2.0") is None


def test_the_committed_rows_are_green_and_have_the_stated_ranges() -> None:
    committed = read_record(ROOT / "docs/results/compat")
    assert committed is not None
    done = [outcome.row for outcome in committed.rows]
    assert done == [row.name for row in ROWS if row.name in done]
    assert not [outcome.row for outcome in committed.rows if outcome.verdict == "red"]
    assert committed.stated == ranges(), "a range was changed: `make compat` writes the table again"
    assert page(committed) == (ROOT / "docs/results/compat.md").read_text(encoding="utf-8")


def test_the_oldest_row_had_every_stated_floor() -> None:
    committed = read_record(ROOT / "docs/results/compat")
    assert committed is not None
    oldest = next(outcome for outcome in committed.rows if outcome.row == "oldest")
    floors = {name: found for name, stated in ranges().items() if (found := floor(stated))}
    other = {
        name: oldest.installed.get(name) for name in floors if release(oldest.installed[name]) != release(floors[name])
    }
    assert not other, "run `python3.11 -m tools.compat --only oldest` again"


def release(version: str) -> list[int]:
    """2.8, 2.8.0 and 2.8.0+cpu are the same release."""
    numbers = [int(part) for part in version.partition("+")[0].split(".")]
    while numbers[-1] == 0:
        numbers.pop()
    return numbers
