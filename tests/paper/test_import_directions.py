"""The engine imports no family of recipes, and a family imports no other family."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_import_directions import imported_modules
from zloss_paper import engine

PAPER = Path(engine.__file__).parents[1]
PACKAGES = sorted(path.name for path in PAPER.iterdir() if (path / "__init__.py").is_file())


def wrong_imports(text: str, package: str) -> set[str]:
    """The packages of zloss_paper that a source of `package` must not import, but does."""
    parts = [module.split(".") for module in imported_modules(text)]
    return {part[1] for part in parts if part[0] == "zloss_paper" and len(part) > 1} - {"engine", package}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    wrong = {path: wrong_imports(path.read_text(), package) for path in (PAPER / package).rglob("*.py")}
    assert wrong
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("engine", "from zloss_paper.training.table import TrainingTable"),
        ("engine", "def run():\n    from zloss_paper.heads.recipe import head_lines"),
        ("heads", "import zloss_paper.implementations.recipe"),
        ("training", "from zloss_paper import heads"),
    ],
)
def test_a_wrong_import_is_seen(package: str, line: str) -> None:
    assert wrong_imports(line, package)
