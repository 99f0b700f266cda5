"""Generated pages are up to date, and complete with respect to the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zloss
from tests.docs.pages import DOCS, ROOT
from tools.docs.commands import VARIABLES
from tools.docs.generated import generated
from zloss.results.quantities import QUANTITIES

GENERATED = generated()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.is_file(), "run `make pages`"
    assert path.read_text(encoding="utf-8") == GENERATED[path], f"{path.relative_to(ROOT)} is old: run `make pages`"


def test_every_quantity_has_one_place_in_the_glossary() -> None:
    ids = re.findall(r'<a id="([^"]+)"', (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert sorted(ids) == sorted(quantity.key for quantity in QUANTITIES)


def test_every_environment_variable_that_is_read_is_listed() -> None:
    listed = {name for name, _ in VARIABLES}
    sources = [path.read_text(encoding="utf-8") for path in Path(zloss.__file__).parent.rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"(ZLOSS_[A-Z_]+)"', text)}
    read |= {name for text in sources for name in re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', text)}
    assert read <= listed, read - listed
    assert all(any(name in text for text in sources) for name in listed)


def test_every_public_name_has_its_place_in_the_reference() -> None:
    shown = re.findall(r"^::: (\S+)", (DOCS / "reference/python.md").read_text(encoding="utf-8"), re.MULTILINE)
    homes = {f"{getattr(zloss, name).__module__}.{name}" for name in set(zloss.__all__) - {"__version__", "errors"}}
    assert homes <= set(shown), homes - set(shown)
    assert "zloss.errors" in shown


def test_every_key_of_a_written_file_has_a_meaning() -> None:
    lines = GENERATED[DOCS / "reference/files.md"].splitlines()
    assert [line for line in lines if line.startswith("| `") and line.endswith("|  |")] == []
