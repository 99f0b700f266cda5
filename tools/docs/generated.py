"""Path → text of everything under docs/ that is made from the sources or from committed results."""

from __future__ import annotations

from pathlib import Path

from tools.docs.commands import commands
from tools.docs.files import files
from tools.docs.glossary import glossary

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def generated() -> dict[Path, str]:
    """Every generated file."""
    return {
        DOCS / "glossary.md": glossary(),
        DOCS / "reference" / "files.md": files(),
        DOCS / "reference" / "commands.md": commands(),
    }
