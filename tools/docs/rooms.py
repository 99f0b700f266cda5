"""docs/figures/rooms.svg: who imports whom, from the drawing in docs/architecture.md."""

from __future__ import annotations

import re
from pathlib import Path

from tools.docs.drawing import WIDE, box, curve, picture, text

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
BOX, GAP, STEP = 90, 11, 74


def edges() -> list[tuple[str, str]]:
    """(room, room that it imports) of the drawing."""
    return re.findall(r"^ +(\w+) --> (\w+)$", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)


def rooms() -> str:
    """Rooms in rows: each stands below every room that imports it."""
    found = edges()
    level: dict[str, int] = {}

    def depth(room: str) -> int:
        if room not in level:
            level[room] = max((depth(above) + 1 for above, below in found if below == room), default=0)
        return level[room]

    rows: list[list[str]] = []
    for room in dict.fromkeys(room for edge in found for room in edge):
        while len(rows) <= depth(room):
            rows.append([])
        rows[level[room]].append(room)
    place: dict[str, float] = {}
    for row in rows:
        # A room stands below the middle of those that import it; neighbours keep their distance.
        wanted = {room: _mean([place[above] for above, below in found if below == room]) for room in row}
        row.sort(key=lambda room: wanted[room])
        start = WIDE / 2 - (len(row) - 1) * (BOX + GAP) / 2
        place |= {room: start + i * (BOX + GAP) for i, room in enumerate(row)}
    parts = []
    for above, below in found:
        parts.append(curve(place[above], 16 + STEP * level[above] + 28, place[below], 16 + STEP * level[below]))
    for room, x in place.items():
        y = 16 + STEP * level[room]
        parts += [box(x - BOX / 2, y, BOX, 28), text(x, y + 18, room, "mid")]
    return picture(
        WIDE,
        16 + STEP * len(rows) - 30,
        "Rooms of the package: each imports the rooms that its lines lead down to",
        parts,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else WIDE / 2
