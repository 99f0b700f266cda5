"""JSON is read strictly, and every damage is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from zloss.errors import InputError
from zloss.results.io import json_lines, parse_json, read_json, read_object


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", "[-1e400]", '{"a": ' + "9" * 400 + "}", "[" * 100_000, "", "{", "\ud800"]
)
def test_what_is_not_strict_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_numbers_of_the_whole_range_are_read() -> None:
    assert parse_json("[1e308, -1e308, 5e-324, 123456789012345678901234567890]")[:2] == [1e308, -1e308]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b'{"a": NaN}', b"[" * 100_000])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.json cannot be read, because it is not JSON .*make it again\.") as caught:
        read_json(tmp_path / "a.json", advice="make it again")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_list_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file"):
        read_object(tmp_path / "none.json", advice="make it again")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match=r"is expected to hold an object, but holds a list"):
        read_object(tmp_path / "list.json", advice="make it again")


def test_lines_end_at_line_feeds_alone() -> None:
    """`str.splitlines` broke inside strings that hold U+2028, U+0085, form feeds and others."""
    text = '{"a": "x\u2028y\u0085z\x0c"}\r\n{"a": 1}\n\n{"a": 2}'
    assert list(json_lines(text)) == ['{"a": "x\u2028y\u0085z\x0c"}', '{"a": 1}', "", '{"a": 2}']
    assert list(json_lines("")) == []
