"""The compiled helper on disk: damaged files are built again, files that others can write are not loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from zloss.errors import OutputError
from zloss.head.native import load_library, load_rows, store_library

pytestmark = pytest.mark.skipif(isinstance(load_rows(), str), reason=f"no compiled helper: {load_rows()}")

PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void planted(void) { fopen("%s", "w"); }
void zloss_exp_rows(void) {}
"""


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; the helper is loaded anew, now and for the tests that follow."""
    monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "cache"))
    load_rows.cache_clear()
    yield tmp_path / "cache"
    load_rows.cache_clear()


def library(cache: Path) -> Path:
    (file,) = (cache / "native").iterdir()
    return file


def in_process(cache: Path) -> None:
    """Load and use the helper in a process of its own."""
    code = (
        "import torch; from zloss.head.rows import fused_exp_rows_\n"
        "assert fused_exp_rows_(torch.zeros(40, 1000))[1].sum() == 40000"
    )
    environment = os.environ | {"ZLOSS_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, (done.returncode, done.stderr)


def planted(folder: Path) -> tuple[bytes, Path]:
    """A foreign library, and the file that exists once it was loaded."""
    loaded, code, built = folder / "loaded", folder / "planted.c", folder / "planted.so"
    code.write_text(PLANTED % loaded)
    subprocess.run(["cc", "-shared", "-fPIC", str(code), "-o", str(built)], check=True)
    return built.read_bytes(), loaded


def test_the_helper_is_kept_for_the_user_alone_and_built_once(fresh: Path) -> None:
    assert isinstance(load_rows(), ctypes.CDLL)
    kept = library(fresh).stat()
    assert kept.st_mode & 0o077 == 0
    load_rows.cache_clear()
    assert isinstance(load_rows(), ctypes.CDLL)
    assert library(fresh).stat().st_ino == kept.st_ino


def test_a_cut_off_helper_is_built_again(fresh: Path) -> None:
    """A cut-off library ended every process with SIGBUS until it was deleted."""
    assert isinstance(load_rows(), ctypes.CDLL)
    file = library(fresh)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    in_process(fresh)
    assert len(library(fresh).read_bytes()) == len(whole)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.95, 0.999, 1.0])
def test_damaged_content_is_not_loaded(tmp_path: Path, share: float) -> None:
    content, loaded = planted(tmp_path)
    file = tmp_path / "own" / f"{uuid.uuid4()}.so"
    assert store_library(file, content)
    whole = file.read_bytes()
    cut = whole[: int(share * len(whole))]
    flipped = bytearray(whole)
    flipped[min(int(share * len(whole)), len(whole) - 1)] ^= 1
    for damaged in (cut if share < 1 else content, bytes(flipped), whole + b"\0"):
        file.write_bytes(damaged)
        assert load_library(file) is None
    assert not loaded.exists()
    file.write_bytes(whole)
    assert load_library(file) is not None
    assert loaded.exists()


@pytest.mark.parametrize(
    "way", ["file for all", "file for the group", "folder for all", "link", "owner of the file", "owner of the folder"]
)
def test_a_library_that_others_can_write_is_not_loaded(tmp_path: Path, way: str) -> None:
    content, loaded = planted(tmp_path)
    file = tmp_path / "shared" / f"{uuid.uuid4()}.so"
    assert store_library(file, content)
    if way.startswith("file for"):
        file.chmod(0o606 if way == "file for all" else 0o660)
    elif way == "folder for all":
        file.parent.chmod(0o777)
        assert not store_library(file, content)
    elif way == "link":
        elsewhere = tmp_path / "elsewhere.so"
        file.replace(elsewhere)
        file.symlink_to(elsewhere)
    elif os.geteuid() != 0:
        pytest.skip("only root can give files away")
    else:
        os.chown(file if way == "owner of the file" else file.parent, 12345, -1)
    assert load_library(file) is None
    assert not loaded.exists()


def test_a_planted_helper_in_a_shared_cache_is_not_executed(fresh: Path, tmp_path: Path) -> None:
    assert isinstance(load_rows(), ctypes.CDLL)
    content, loaded = planted(tmp_path)
    assert store_library(library(fresh), content)
    library(fresh).parent.chmod(0o777)
    in_process(fresh)
    assert not loaded.exists()


@pytest.mark.parametrize("compiler", ["cc -g0", ""])
def test_a_compiler_may_have_options(fresh: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    assert isinstance(load_rows(), ctypes.CDLL)


def test_a_compiler_that_is_no_command_line_is_a_reason(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc 'unclosed")
    assert "$CC is not a command line" in str(load_rows())


@pytest.mark.parametrize("missing", ["folder", "home"])
def test_without_a_cache_the_helper_is_built_for_this_process_and_nothing_is_left(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    if missing == "folder":
        monkeypatch.setenv("ZLOSS_CACHE", str(tmp_path / "file" / "cache"))
    else:
        monkeypatch.setattr("zloss.head.native.cache_root", without_home)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert isinstance(load_rows(), ctypes.CDLL)
    assert not list(scratch.iterdir())


def without_home() -> Path:
    raise OutputError("there is no folder for a cache: set ZLOSS_CACHE to one.")
