"""Every fuzzer by its kind: a function of a seed and of a folder that it may fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fuzz import command_line, corpora, losses, model_folders, result_files, run_folders

Case = Callable[[int, Path], None]
_MODULES = (losses, result_files, run_folders, corpora, model_folders, command_line)
KINDS: dict[str, Case] = {module.KIND: module.case for module in _MODULES}
