"""Sections of a result as lines."""

from __future__ import annotations

from zloss.report.tables.plain import flat_lines


def test_nested_values_have_dotted_keys_and_extra_has_no_name() -> None:
    section = {"a": {"b": 1.5, "extra": {"beta": 0.01}}, "list": [{"c": True}, 3], "numbers": [1, 2], "none": None}
    assert flat_lines(section) == [
        ("a.b", "1.5"),
        ("a.beta", "0.01"),
        ("list.0.c", "yes"),
        ("list.1", "3"),
        ("numbers", "1, 2"),
        ("none", "–"),
    ]
    assert flat_lines(section, skip=("a", "list", "numbers")) == [("none", "–")]
