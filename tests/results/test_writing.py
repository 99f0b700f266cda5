"""Files appear whole or not at all."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.child import without_privileges
from tests.forked import Forked
from zloss.errors import OutputError
from zloss.results.io import write_json, write_text
from zloss.results.record import to_plain


def test_numbers_stand_on_one_line_and_text_stays_as_it_is(tmp_path: Path) -> None:
    data = {"column": [1.5, -2e-7, 3], "text": ["[ 1, 2 ]", "[\n 1,\n 2\n]"], "empty": [], "nested": [[1, 2], [3]]}
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == data
    assert "[1.5, -2e-07, 3]" in text


def test_nan_is_refused_and_the_earlier_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}


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


def test_a_report_is_readable_like_any_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "half a character \ud83d")
    (tmp_path / "b.txt").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "b.txt")}
    assert len(modes) == 1


@dataclass(frozen=True)
class Settings:
    size: int | str | None = "auto"


def test_a_record_that_is_only_written_may_have_any_types() -> None:
    """Reading knows one type beside null; settings in the description of a recipe have several."""
    assert to_plain(Settings()) == {"size": "auto"}
