"""Every fuzzer by its kind: a function of a seed and of a folder that it may fill."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch

from tests.fuzz import command_line, corpora, losses, model_folders, result_files, run_folders

CASES: dict[str, Callable[[Random, Path], None]] = {
    "public losses": losses.case,
    "result files": result_files.case,
    "run folders": run_folders.case,
    "corpora": corpora.case,
    "model folders": model_folders.case,
    "command line": command_line.case,
}


def run_case(kind: str, seed: int, folder: Path) -> None:
    """One case in an empty folder; the seed determines what it draws."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(seed % 2**31)
    CASES[kind](Random(f"{kind} {seed}"), folder)


KINDS: dict[str, Callable[[int, Path], None]] = {kind: partial(run_case, kind) for kind in CASES}
