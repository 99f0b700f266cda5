"""The output folder is checked before the work starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zloss.errors import OutputError
from zloss.results.folder import check_folder


def test_a_folder_that_can_be_made_is_left_unmade(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "deeper")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to .*out: .*file is not a writable folder"):
        check_folder(tmp_path / "file" / "out")
