"""Builds rows.c with the machine's C compiler on first use and keeps the result in the user's cache.

Without a compiler, on another system than Linux, or with ZLOSS_NATIVE=0 there is no helper, and the chunked backend does
the same work in tensor operations; `why_missing` gives the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from zloss.cache import cache_root

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def load_rows() -> ctypes.CDLL | str:
    """The compiled library, or the reason why there is none."""
    if os.environ.get("ZLOSS_NATIVE", "1") == "0":
        return "switched off by ZLOSS_NATIVE=0"
    if sys.platform != "linux":
        return f"the helper is built on Linux only, and this is {sys.platform}"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler was found (cc, or $CC)"
    source = files("zloss.transport.backends.native").joinpath("rows.c").read_text()
    try:
        library = ctypes.CDLL(str(_built(source, compiler)))
        function = library.zloss_exp_rows
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        return f"building it failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer, pointer, pointer]
    function.restype = None
    return library


def why_missing() -> str | None:
    """Why there is no helper here; None where there is one."""
    found = load_rows()
    return found if isinstance(found, str) else None


def _built(source: str, compiler: str) -> Path:
    """The shared object for this source, compiler and processor; built beside its place and moved onto it."""
    key = hashlib.sha256("\0".join((source, compiler, *_FLAGS, _processor())).encode()).hexdigest()[:16]
    target = cache_root() / "native" / f"rows-{key}.so"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.mkdtemp(dir=target.parent, prefix=".building-")
    except OSError:  # no cache to write to: build for this process alone
        folder = tempfile.mkdtemp(prefix="zloss-")
        target = Path(folder) / "rows.so"
    try:
        code, built = Path(folder) / "rows.c", Path(folder) / "built.so"
        code.write_text(source)
        command = [compiler, *_FLAGS, str(code), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        built.replace(target)
    finally:
        if target.parent != Path(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = ""
    return platform.machine() + flags
