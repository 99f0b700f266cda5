"""The site builds without a warning and asks nothing of other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'zloss[docs]')")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = "index" if page.stem == "README" else page.stem
        assert (site / page.relative_to(DOCS).with_name(f"{name}.html")).is_file(), page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    # Addresses in <a href> are for people; those in other elements are requests.
    for page in site.rglob("*.html"):
        elements = re.findall(r"<(?!a\b)[a-z]+\b[^>]*>", page.read_text(encoding="utf-8"))
        asked = [element for element in elements if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", element)]
        assert not asked, (page.name, asked)
