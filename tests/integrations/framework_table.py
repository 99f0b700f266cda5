"""Rows of docs/results/frameworks.md: what a test of a framework measured (`tools/frameworks.py`)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE_VARIABLE = "ZLOSS_FRAMEWORK_TABLE"
"""Environment variable with the file that rows are appended to; unset: nothing is written."""


@dataclass(frozen=True)
class Row:
    case: str
    error: float
    """Relative difference to the reference."""
    without_z: float
    """The same difference of a run or gradient without Z."""


def check_and_record(case: str, error: float, without_z: float, tolerance: float = 1e-5) -> None:
    """Assert that the error is small and that a missing Z would be at least 100 times as large; add the row."""
    if TABLE_VARIABLE in os.environ:
        with Path(os.environ[TABLE_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(Row(case, error, without_z))) + "\n")
    assert error <= tolerance, (case, error)
    assert without_z >= 100 * error, (case, error, without_z)
