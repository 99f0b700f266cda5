"""docs/figures/packages.svg: who imports whom, from the drawing in docs/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

from tools.docs.drawing import WIDE, box, curve, picture, text

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
BOX, GAP, STEP = 90, 11, 74


def edges() -> list[tuple[str, str]]:
    """(package, package that it imports) of the drawing."""
    return re.findall(r"^ +(\w+) --> (\w+)$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)


def packages() -> str:
    """Packages in rows: each stands below every package that imports it."""
    found = edges()
    level: dict[str, int] = {}

    def depth(package: str) -> int:
        if package not in level:
            level[package] = max((depth(above) + 1 for above, below in found if below == package), default=0)
        return level[package]

    rows: list[list[str]] = []
    for package in dict.fromkeys(package for edge in found for package in edge):
        while len(rows) <= depth(package):
            rows.append([])
        rows[level[package]].append(package)
    place: dict[str, float] = {}
    for row in rows:
        # A package stands below the middle of those that import it; neighbours keep their distance.
        wanted = {package: _mean([place[above] for above, below in found if below == package]) for package in row}
        row.sort(key=lambda package: wanted[package])
        start = WIDE / 2 - (len(row) - 1) * (BOX + GAP) / 2
        place |= {package: start + i * (BOX + GAP) for i, package in enumerate(row)}
    parts = []
    for above, below in found:
        parts.append(curve(place[above], 16 + STEP * level[above] + 28, place[below], 16 + STEP * level[below]))
    for package, x in place.items():
        y = 16 + STEP * level[package]
        parts += [box(x - BOX / 2, y, BOX, 28), text(x, y + 18, package, "mid")]
    return picture(
        WIDE,
        16 + STEP * len(rows) - 30,
        "Packages of zloss: each imports those that its lines lead down to",
        parts,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else WIDE / 2
