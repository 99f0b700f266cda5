"""Builds rows.c with the machine's C compiler on first use and keeps the result in the user's cache.

Without a compiler, on another system than Linux, or with ZLOSS_NATIVE=0 there is no helper, and the chunked backend does
the same work in tensor operations; `why_missing` gives the reason. Where the cache cannot be written, or others can write to
it, the helper is built for this process alone, in a temporary folder that is removed once it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from zloss.cache import cache_root
from zloss.transport.backends.native.sealed_library import load_library, store_library

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def load_rows() -> ctypes.CDLL | str:
    """The compiled library, or the reason why there is none."""
    if os.environ.get("ZLOSS_NATIVE", "1") == "0":
        return "switched off by ZLOSS_NATIVE=0"
    if sys.platform != "linux":
        return f"the helper is built on Linux only, and this is {sys.platform}"
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    except ValueError as error:
        return f"$CC is no command line: {error}"
    compiler = shutil.which(words[0])
    if compiler is None:
        return "no C compiler was found (cc, or $CC)"
    source = files("zloss.transport.backends.native").joinpath("rows.c").read_text()
    try:
        library = _kept_or_built(source, [compiler, *words[1:]])
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


def _kept_or_built(source: str, compiler: list[str]) -> ctypes.CDLL:
    """The library for this source, compiler and processor, from the cache or built now."""
    key = hashlib.sha256("\0".join((source, *compiler, *_FLAGS, _processor())).encode()).hexdigest()[:16]
    try:
        kept = cache_root() / "native" / f"rows-{key}.so"
    except OSError:  # a user without a home
        kept = None
    library = None if kept is None else load_library(kept)
    if library is not None:
        return library
    with tempfile.TemporaryDirectory(prefix="zloss-") as folder:
        code, built = Path(folder) / "rows.c", Path(folder) / "rows.so"
        code.write_text(source)
        command = [*compiler, *_FLAGS, str(code), "-o", str(built), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        if kept is not None and store_library(kept, built.read_bytes()):
            library = load_library(kept)
        # The system keeps a loaded library after its file is gone.
        return library if library is not None else ctypes.CDLL(str(built))


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = ""
    return platform.machine() + flags
