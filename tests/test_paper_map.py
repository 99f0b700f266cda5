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


def test_every_row_names_functions_that_import_and_tests_that_exist() -> None:
    assert len(ROWS) >= 20
    for row in ROWS:
        assert len(row) == 4, row
        functions, tests = re.findall(r"`([\w.]+)`", row[2]), re.findall(r"`([\w/]+\.py)::(\w+)`", row[3])
        assert functions, row
        assert tests, row
        for name in functions:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
        for path, name in tests:
            tree = ast.parse((ROOT / path).read_text())
            known = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in known, f"{path}::{name}"
