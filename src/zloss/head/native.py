"""The loader of the fused row pass in C (`rows.c`), which is built on first use and kept in the user's cache.

Where the cache cannot be written, or others can write to it, it is built for this process alone. A library that is cut off
ends the process with SIGBUS when it is loaded, and one that somebody else put there runs with the rights of the user: so
a file is loaded only if the checksum at its end fits, and if nobody but the user or root can have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from zloss.cache import cache_root

_CODE = Path(__file__).with_name("rows.c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def load_rows() -> ctypes.CDLL | str:
    """The compiled library, or the reason why there is none."""
    if os.environ.get("ZLOSS_NATIVE", "1") == "0":
        return "switched off by ZLOSS_NATIVE=0"
    if sys.platform != "linux":
        return f"the helper is built on Linux only, and this is {sys.platform}"
    try:
        command = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if (compiler := shutil.which(command[0])) is None:
            return "no C compiler was found (cc, or $CC)"
        library = _cached_or_built([compiler, *command[1:]])
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        library.zloss_exp_rows.argtypes = [pointer, size, size, size, pointer, pointer, pointer]
        library.zloss_exp_rows.restype = None
    except ValueError as error:
        return f"$CC is not a command line: {error}"
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        return f"building it failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return library


def _cached_or_built(compiler: list[str]) -> ctypes.CDLL:
    processor = re.findall("^(?:flags|Features).*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    key = (_CODE.read_text(), compiler, _FLAGS, os.uname().machine, processor[:1])  # machines may share a cache folder
    try:
        file = cache_root() / "native" / f"rows-{sha256(repr(key).encode()).hexdigest()[:16]}.so"
    except OSError:  # a user without a home
        file = Path(os.devnull) / "rows.so"  # where nothing is found or kept
    if (library := load_library(file)) is not None:
        return library
    with tempfile.TemporaryDirectory(prefix="zloss-") as folder:
        built = Path(folder) / "rows.so"
        subprocess.run([*compiler, *_FLAGS, _CODE, "-o", built, "-lm"], check=True, capture_output=True, timeout=60)
        library = load_library(file) if store_library(file, built.read_bytes()) else None
        return ctypes.CDLL(str(built)) if library is None else library  # a loaded library outlives its file


def store_library(file: Path, content: bytes) -> bool:
    """Put the content and its checksum at `file` in one step; False if it cannot be kept there, or not safely."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _only_ours(file.parent.lstat()):
            return False
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            complete = Path(folder) / file.name
            complete.write_bytes(content + sha256(content).digest())
            complete.chmod(0o600)
            complete.replace(file)
        return True
    return False


def load_library(file: Path) -> ctypes.CDLL | None:
    """The library of `store_library`; None where there is none, where it is damaged, or where others could have written it."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        folder = os.open(file.parent, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        opened.callback(os.close, folder)
        status = os.stat(file.name, dir_fd=folder, follow_symlinks=False)
        safe = _only_ours(os.fstat(folder)) and _only_ours(status) and stat.S_ISREG(status.st_mode)
        path = f"/proc/self/fd/{folder}/{file.name}"  # in the folder that was checked, whatever is at its path now
        content = Path(path).read_bytes() if safe else b""
        if content[-32:] == sha256(content[:-32]).digest():
            return ctypes.CDLL(path)
    return None


def _only_ours(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user or root, and nobody else may write to it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
