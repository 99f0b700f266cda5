"""Processes that a test launches with torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, *options: str) -> list[str]:
    """The words of a launch on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]


def launched(ranks: int, module: str, *words: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    """A module on several processes, to its end."""
    command = [*torchrun(ranks), "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def rank_of(launcher: int, rank: int) -> int | None:
    """The process of a rank among the children of a launcher."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except FileNotFoundError:  # it has just ended
            continue
        if f"RANK={rank}".encode() in settings:
            return int(child)
    return None
