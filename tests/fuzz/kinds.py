"""Every fuzzer by its kind: a function of a seed and of a folder that it may fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fuzz import result_files, run_folders

Case = Callable[[int, Path], None]
KINDS: dict[str, Case] = {module.KIND: module.case for module in (result_files, run_folders)}
