"""The rows of `make compat`: constraints from pyproject.toml, counts from pytest's file, one table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tools.compat.record import (
    Outcome,
    Record,
    current_record,
    installer_reason,
    page,
    read_record,
    with_counts,
    write_record,
)
from tools.compat.rows import EVERY, ROOT, ROWS, Row, constraints, floor, pinned_versions, ranges, stated_ranges
from tools.compat.selection import DESELECTED, FILES

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
    plain = {"torch": ">=2.8", "numpy": ">=1.26"}
    assert stated_ranges(made(tmp_path), ()) == plain
    assert stated_ranges(made(tmp_path), ("one",)) == plain | {"rich": ">=13,<15", "free": ""}
    with pytest.raises(ValueError, match="torch @ somewhere"):
        stated_ranges(made(tmp_path, PYPROJECT.replace("torch>=2.8", "torch @ somewhere")), ())


def test_a_row_has_the_floors_and_pins_it_names() -> None:
    stated, pins = ranges(), pinned_versions(ROOT / "constraints.txt")
    assert [floor(spec) for spec in (">=2.8", ">=13,<15", "<2,>=1.6", "")] == ["2.8", "13", "1.6", None]
    mixed = constraints(Row("x", "3.11", "", oldest=("transformers",), pinned=("torch",)))
    assert mixed == {"transformers": floor(stated["transformers"]), "torch": pins["torch"]}
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.9.0")
    assert constraints(Row("x", "3.11", "")) == {}
    oldest = constraints(Row("x", "3.11", "", oldest=(EVERY,)))
    assert oldest.keys() == stated.keys()
    assert None not in oldest.values()


def test_the_selection_exists_and_covers_every_package() -> None:
    assert not [file for file in (*FILES, *DESELECTED) if not (ROOT / file.partition("::")[0]).exists()]
    packages = {path.name for path in (ROOT / "src/zloss").iterdir() if (path / "__init__.py").is_file()}
    selected = {file.split("/")[1] for file in FILES}
    assert packages - selected == set()


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
    found = with_counts(GREEN, junit)
    assert (found.passed, found.failed, found.skipped) == (1, 2, 1)
    assert found.failures == ("tests/a/test_b.py::test_c[1]", "tests/a/test_b.py::test_d")
    assert found.skips == {"needs gpu": 1}


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


def test_the_page_says_what_failed_and_what_was_unavailable() -> None:
    changes = {"failed": 1, "passed": 0, "unavailable": "no Python 3.19"}
    verdicts = [replace(GREEN, **{name: value}).verdict for name, value in changes.items()]
    assert [GREEN.verdict, *verdicts] == ["green", "red", "red", "unavailable"]
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


def test_records_are_read_back_and_a_new_outcome_replaces_the_old_one(tmp_path: Path) -> None:
    names = [row.name for row in ROWS[:3]]
    old = current_record(replace(GREEN, row=name) for name in names)
    new = current_record([*old.rows, replace(GREEN, row=names[1], passed=9)])
    assert [(outcome.row, outcome.passed) for outcome in new.rows] == [(names[0], 7), (names[1], 9), (names[2], 7)]
    assert read_record(tmp_path / "compat") is None
    write_record(tmp_path / "compat", new)
    assert read_record(tmp_path / "compat") == new


def test_the_committed_rows_are_green_and_have_the_stated_ranges() -> None:
    committed = read_record(ROOT / "docs/results/compat")
    done = {outcome.row: outcome for outcome in committed.rows}
    assert list(done) == [row.name for row in ROWS if row.name in done]
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert not [outcome.row for outcome in committed.rows if outcome.verdict == "red"]
    assert committed.stated == ranges(), "a range was changed: `make compat` writes the table again"
    assert page(committed) == (ROOT / "docs/results/compat.md").read_text(encoding="utf-8")
    # A Python is stated once a row on it is green.
    green = {".".join(one.python.split(".")[:2]) for one in committed.rows if one.verdict == "green"}
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert set(re.findall(r"Python :: (3\.\d+)", text)) == green
    # The oldest row had every stated floor; 2.8, 2.8.0 and 2.8.0+cpu are the same release.
    installed = done["oldest"].installed
    for name, stated in ranges().items():
        if (oldest := floor(stated)) is not None:
            release = re.sub(r"(\.0)+$", "", installed[name].partition("+")[0])
            assert release == re.sub(r"(\.0)+$", "", oldest), (
                f"{name}: `python3.11 -m tools.compat --only oldest` again"
            )
