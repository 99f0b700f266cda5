"""Path → text of everything under docs/ that is made from the sources or from committed results."""

from __future__ import annotations

import re
from pathlib import Path

from tools.docs import tables
from tools.docs.commands import commands
from tools.docs.figures import figures
from tools.docs.files import files
from tools.docs.glossary import glossary
from tools.docs.names import names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def generated() -> dict[Path, str]:
    """Every generated file."""
    return {
        DOCS / "glossary.md": glossary(),
        DOCS / "reference" / "files.md": files(),
        DOCS / "reference" / "commands.md": commands(),
        DOCS / "reference" / "python.md": with_parts(
            DOCS / "reference" / "python.md", names=names(DOCS / "reference" / "python.md")
        ),
        DOCS / "audit_loss.md": with_parts(DOCS / "audit_loss.md", checks=tables.checks()),
        DOCS / "coming_from.md": with_parts(DOCS / "coming_from.md", heads=tables.heads(), routers=tables.routers()),
        DOCS / "support_transformers.md": tables.support_page(),
        DOCS / "evidence.md": with_parts(DOCS / "evidence.md", summary=tables.summary(), claims=tables.claims()),
        **{DOCS / "figures" / name: text for name, text in figures().items()},
    }


def with_parts(path: Path, **parts: str) -> str:
    """The text of a page with the parts between `<!-- NAME -->` and `<!-- end of NAME -->` replaced."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        marked = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marked.search(text), f"{path.name} has no place for {name}"
        # A function, not a template: backslashes in a part are literal.
        text = marked.sub(lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text)
    return text
