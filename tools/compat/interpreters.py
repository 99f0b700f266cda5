"""Where a Python of a wanted version is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def interpreter(version: str) -> str | None:
    """A program whose Python has the version, as in "3.12", and which can make environments; None where there is none."""
    return next((program for program in candidates(version) if works(program, version)), None)


def candidates(version: str) -> Iterator[str]:
    """This interpreter, those on PATH, those of pyenv, which is not on PATH for versions that were not chosen."""
    yield sys.executable
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield str(Path(folder) / f"python{version}")
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True))


def works(program: str, version: str) -> bool:
    """A program on PATH may be a shim without a Python behind it, or a Python without `ensurepip`."""
    question = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    try:
        return subprocess.run([program, "-c", question], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
