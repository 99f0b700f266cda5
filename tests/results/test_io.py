"""JSON is read strictly, every damage is one sentence, and files appear whole or not at all."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.child import without_privileges
from tests.forked import Forked
from zloss.errors import InputError, OutputError
from zloss.results.io import json_lines, parse_json, read_json, read_object, write_json, write_text


@pytest.mark.parametrize(
    "text", ["NaN", "-Infinity", "1e999", "[-1e400]", '{"a": ' + "9" * 400 + "}", "[" * 100_000, "", "{", "\ud800"]
)
def test_what_is_not_strict_json_is_a_value_error(text: str) -> None:
    assert parse_json("[1e308, -1e308, 5e-324, 123456789012345678901234567890]")[:2] == [1e308, -1e308]
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        *(
            (content, r"cannot be read, because it is not JSON .*make it again\.")
            for content in (b"", b"{", b"\xff\xfe{}", b'{"a": NaN}', b"[" * 100_000)
        ),
        (None, "No such file"),
        (b"[]", "is expected to hold an object, but holds a list"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.json .*{sentence}") as caught:
        (read_object if content in (None, b"[]") else read_json)(tmp_path / "a.json", advice="make it again")
    assert "\n" not in str(caught.value)


def test_lines_end_at_line_feeds_alone() -> None:
    """`str.splitlines` broke inside strings that hold U+2028, U+0085, form feeds and others."""
    text = '{"a": "x\u2028y\u0085z\x0c"}\r\n{"a": 1}\n\n{"a": 2}'
    assert list(json_lines(text)) == ['{"a": "x\u2028y\u0085z\x0c"}', '{"a": 1}', "", '{"a": 2}']
    assert list(json_lines("")) == []


def test_lists_of_numbers_are_one_line_and_nan_is_refused_and_the_earlier_file_stays(tmp_path: Path) -> None:
    data = {"column": [1.5, -2e-7, 3], "text": ["[ 1, 2 ]", "[\n 1,\n 2\n]"], "empty": [], "nested": [[1, 2], [3]]}
    write_json(tmp_path / "a.json", data)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == data
    assert "[1.5, -2e-07, 3]" in text


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    def write() -> int:
        without_privileges()  # root may write anywhere
        with pytest.raises(OutputError, match="cannot write"):
            write_text(tmp_path / "report.json", "x")
        return 0

    ended = Forked(write).wait()
    assert ended.code == 0, ended.error


def test_running_out_of_space_leaves_the_earlier_report_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "earlier")
    # A limit on file size fails a write halfway, as a full disk does.
    code = (
        "import resource, sys; from pathlib import Path; from zloss.results.io import write_text; "
        "from zloss.errors import OutputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except OutputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert path.read_text() == "earlier"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_report_is_readable_like_any_file_and_its_name_may_have_255_bytes(tmp_path: Path) -> None:
    """The temporary name was longer than the file's, and too long for the file system."""
    path = tmp_path / ("n" * 250 + ".json")
    write_text(path, "half a character \ud83d")
    (tmp_path / "plain").write_text("")
    assert len({stat.S_IMODE(place.stat().st_mode) for place in (path, tmp_path / "plain")}) == 1
    with pytest.raises(OutputError, match="File name too long"):
        write_text(tmp_path / ("n" * 256), "x")
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "plain"}
