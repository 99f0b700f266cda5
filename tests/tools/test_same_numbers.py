"""The check of refactorings fails on every kind of difference that is not explicitly allowed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.same_numbers import ALLOWED, REFERENCE, ROOT, compare, read, read_allowed

RESULT: dict[str, Any] = {
    "schema": "zloss.audit/1",
    "ppl": 29.5,
    "heads": {"raw": {"gain": [1.0, 2.0]}},
    "decisions": [{"stage": "shift", "fired": False, "reason": None}],
    "provenance": {"seconds": 3.0},
}


def change(path: str, value: Any) -> dict[str, Any]:
    result = json.loads(json.dumps(RESULT))
    at = result
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return result


def same(
    folder: Path, after: dict[str, Any], *, tolerance: float = 0.0, allowed: tuple[tuple[str, str], ...] = ()
) -> bool:
    values = []
    for side, result in (("before", RESULT), ("after", after)):
        (folder / side).mkdir(exist_ok=True)
        (folder / side / "report.json").write_text(json.dumps(result))
        values.append(read(folder / side, folder / "inputs"))
    return compare("audit", *values, tolerance, list(allowed))


def test_equal_results_pass_whatever_the_clock_says(tmp_path: Path) -> None:
    assert same(tmp_path, change("provenance.seconds", 4.0))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "zloss.audit/2"),
        ("ppl", 29.6),
        ("ppl", "29.5"),
        ("ppl", None),
        ("heads.raw.gain", [1.0]),
        ("heads.raw.gain", []),
        ("heads.raw.other", 1.0),
        ("decisions.0.fired", True),
        ("decisions.0.fired", 0),
        ("decisions.0.reason", "none"),
        ("decisions.0.stage", "tail"),
    ],
)
def test_a_changed_string_boolean_number_or_key_fails(tmp_path: Path, path: str, value: Any) -> None:
    assert not same(tmp_path, change(path, value), tolerance=1e-6)


def test_only_the_allowed_kind_of_difference_passes(tmp_path: Path) -> None:
    after = change("decisions.0.stage", "tail")
    assert same(tmp_path, after, allowed=(("text", "audit/report.json:decisions.*.stage"),))
    assert not same(tmp_path, after, allowed=(("number", "audit/report.json:decisions.*.stage"),))
    assert not same(tmp_path, after, allowed=(("text", "train/report.json:decisions.*.stage"),))
    assert not same(tmp_path, change("ppl", 29.6), allowed=(("value", "audit/*"),))


def test_changed_texts_are_counted_by_their_place_in_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    before = {f"{file}/report.json:decisions.{i}.reason": f"was {i}" for file in "ab" for i in range(3)}
    after = {key: text.replace("was", "is") for key, text in before.items()} | {
        "a/report.json:decisions.1.reason": "was 1"
    }
    assert not compare("audits", before, after, 0.0, [])
    printed = capsys.readouterr().out
    assert "NOT ALLOWED: 5 texts report.json:decisions.*.reason: 'was 0' -> 'is 0'" in printed
    assert printed.count("decisions") == 1


def test_the_reference_is_a_commit_of_this_history() -> None:
    assert len(REFERENCE) == 40
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("a shallow clone or a source distribution has no history")
    subprocess.run([*git, "merge-base", "--is-ancestor", REFERENCE, "HEAD"], check=True)


def test_numbers_pass_within_the_tolerance_only_and_a_job_without_results_fails(tmp_path: Path) -> None:
    assert same(tmp_path, change("ppl", 29.5 * (1 + 1e-7)), tolerance=1e-6)
    assert not same(tmp_path, change("ppl", 29.5 * (1 + 1e-7)), tolerance=0)
    assert not compare("audit", {}, {}, 0.0, [])


def test_the_committed_list_can_be_read_and_bad_lines_are_named(tmp_path: Path) -> None:
    read_allowed(ALLOWED)
    bad = tmp_path / "allowed.txt"
    bad.write_text("audit/report.json:ppl\n")
    with pytest.raises(SystemExit, match="KIND PATTERN"):
        read_allowed(bad)
