"""The fused row pass in C (`rows.c`): E = exp(z − m) with its row sums in one pass over a chunk of fp32 logits on the CPU.

The helper is built with the machine's C compiler on first use and kept in the user's cache. Without a compiler, on another
system than Linux, or with ZLOSS_NATIVE=0 there is none, and `rows.py` does the same work in tensor operations;
`why_missing` gives the reason. Where the cache cannot be written, or others can write to it, the helper is built for this
process alone, in a temporary folder that is removed once it is loaded.

A library that is cut off ends the process with SIGBUS when it is loaded, and one that somebody else put there runs with
the rights of the user. So a file is loaded only if the checksum that follows its content fits, and if nobody but the user
(or root) can have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zloss.cache import cache_root

_WORTH_IT = 2**14
"""Elements below which the ctypes call costs more than it saves. Below it the helper is not compiled either."""

RowPassName = Literal["c", "torch"]

_used = False
"""Set by the first fused pass of this process."""


def fused_exp_rows_(z_CV: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Overwrite fp32 logits on the CPU with E = exp(z − m); (m, S, ‖E‖), or None where the helper does not apply."""
    global _used
    # A subclass, such as a FakeTensor, may say that it is on the CPU and have no memory there.
    if type(z_CV) is not Tensor or z_CV.device.type != "cpu" or z_CV.dtype != torch.float32:
        return None
    if z_CV.numel() < _WORTH_IT or z_CV.stride(1) != 1:
        return None
    library = load_rows()
    if isinstance(library, str):
        return None
    # On the device of the logits: torch's default device may be another, whose addresses C cannot write to.
    sums = torch.empty((3, z_CV.shape[0]), dtype=torch.float32, device=z_CV.device)
    pointers = (row.data_ptr() for row in sums)
    library.zloss_exp_rows(z_CV.data_ptr(), z_CV.shape[0], z_CV.shape[1], z_CV.stride(0), *pointers)
    _used = True
    return sums[0], sums[1], sums[2]


def row_pass_name() -> RowPassName:
    """`row_pass` of a provenance: "c" if the compiled row pass did any work in this process, else "torch". The last digits
    of sums depend on it."""
    return "c" if _used else "torch"


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
    except ValueError as error:
        return f"$CC is no command line: {error}"
    compiler = shutil.which(command[0])
    if compiler is None:
        return "no C compiler was found (cc, or $CC)"
    source = files("zloss.head").joinpath("rows.c").read_text()
    try:
        library = _cached_or_built(source, [compiler, *command[1:]])
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


def _cached_or_built(source: str, compiler: list[str]) -> ctypes.CDLL:
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


_MARK = b"zloss-sha256:"
_SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size
"""Length of the seal, a mark and a checksum, which follows the content; loaders ignore what follows an ELF file."""
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH


def store_library(file: Path, content: bytes) -> bool:
    """Put the sealed content at `file`: written next to it, synced, renamed. False if it cannot be kept safely."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _only_ours(file.parent.lstat()):
            return False
        # mkstemp gives the file to the user alone, whatever the umask.
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".building-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as temporary:
            temporary.write(content + _seal(content))
            temporary.flush()
            os.fsync(temporary.fileno())
        Path(name).replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        return False
    return True


def load_library(file: Path) -> ctypes.CDLL | None:
    """The library of `store_library`; None where there is none, where it is damaged, or where others could have written it."""
    with contextlib.ExitStack() as opened:
        try:
            folder = _open(file.parent, os.O_DIRECTORY, None, opened)
            content = _open(file.name, 0, folder, opened)
        except OSError:
            return None
        status = os.fstat(content)
        if not stat.S_ISREG(status.st_mode) or not _only_ours(status) or not _only_ours(os.fstat(folder)):
            return None
        with os.fdopen(os.dup(content), "rb") as stream:
            if not _is_whole(stream.read()):
                return None
        # Through the handle of the folder that was checked, whatever is at its path now.
        return ctypes.CDLL(f"/proc/self/fd/{folder}/{file.name}")


def _open(path: Path | str, flag: int, folder: int | None, opened: contextlib.ExitStack) -> int:
    """A handle of `path`, which is no link, closed with `opened`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag, dir_fd=folder)
    opened.callback(os.close, handle)
    return handle


def _only_ours(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user or root, and nobody else may write to it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_CAN_WRITE


def _is_whole(data: bytes) -> bool:
    content, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    return len(content) > 0 and seal == _seal(content)


def _seal(content: bytes) -> bytes:
    return _MARK + hashlib.sha256(content).digest()
