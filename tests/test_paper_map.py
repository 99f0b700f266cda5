"""docs/paper_map.md is true: its functions import and its tests exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in (ROOT / "docs/paper_map.md").read_text().splitlines()
    if line.startswith("| ") and "`" in line
]


def test_the_map_is_not_empty() -> None:
    assert len(ROWS) >= 20
    assert all(len(row) == 4 for row in ROWS)


def test_every_function_is_importable() -> None:
    for row in ROWS:
        for name in re.findall(r"`([\w.]+)`", row[2]):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_test_exists() -> None:
    for row in ROWS:
        for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", row[3]):
            tree = ast.parse((ROOT / path).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (
                f"{path}::{name}"
            )


def test_every_row_names_a_function_and_a_test() -> None:
    for row in ROWS:
        assert "`" in row[2], row
        assert "::" in row[3], row
