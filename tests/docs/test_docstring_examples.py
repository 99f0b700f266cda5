"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


def _modules(folder: Path, base: Path) -> list[str]:
    """Modules below the folder with an example, by their dotted name."""
    found = [path for path in sorted(folder.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(base).with_suffix("").parts) for path in found]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", [*_modules(ROOT / "src", ROOT / "src"), *_modules(ROOT / "tools", ROOT)])
def test_examples_of_a_module_give_what_they_show(name: str) -> None:
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=options).failed == 0
