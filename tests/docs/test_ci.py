"""CI runs the commands that the README prints, exactly as they are printed there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_calls_the_commands_of_the_readme_and_no_variant_of_them() -> None:
    commands = re.findall(r"^(make \w+)  ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["make audit", "make test"]
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make lint", "make docs", *commands]


def test_no_target_that_ci_calls_starts_another_make() -> None:
    """A nested `make` prints extra lines and passes MAKEFLAGS to what the tests start."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("lint", "docs", "audit", "test", "check"):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)*)", makefile, re.MULTILINE)
        assert recipe
        assert "$(MAKE)" not in recipe[1]
