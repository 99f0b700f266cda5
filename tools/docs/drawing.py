"""Plain SVG for pages in light and dark: one style sheet, axes, bars, dots, boxes and arrows.

The colors follow `prefers-color-scheme`, which a browser takes from the page, so the switch of the site works too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDE = 720
"""Width of every picture."""
STYLE = """
  svg { color-scheme: light dark; --ink: #1f2430; --soft: #5c6470; --rule: #d9dce1; --panel: #f5f6f8;
    --raw: #b4552d; --centered: #2066aa; --third: #33804f; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6e8ec; --soft: #a4abb6; --rule: #3a404b; --panel: #23272f;
      --raw: #e58a5f; --centered: #6fb1ec; --third: #7cc596; }
  }
  text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
  .soft { fill: var(--soft); } .small { font-size: 12px; } .strong { font-weight: 600; }
  .mono { font-family: ui-monospace, Menlo, "DejaVu Sans Mono", monospace; font-size: 12px; }
  .end { text-anchor: end; } .mid { text-anchor: middle; }
  .rule { stroke: var(--rule); fill: none; } .line { stroke: var(--soft); fill: none; stroke-width: 1.4; }
  .box { fill: var(--panel); stroke: var(--rule); }
  .raw { fill: var(--raw); } .centered { fill: var(--centered); } .third { fill: var(--third); }
  .edge-raw { stroke: var(--raw); } .edge-centered { stroke: var(--centered); } .edge-third { stroke: var(--third); }
  .faint { fill-opacity: .55; } .dash { stroke-dasharray: 5 4; }
""".strip("\n")  # fmt: skip


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole SVG file; `title` says in words what it shows."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Words whose baseline starts (`end`: ends, `mid`: is centered) at x, y."""
    return f'<text x="{x:g}" y="{y:g}"{_kind(kind)}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.2f}" height="{height:.2f}" rx="6"{_kind(kind)}/>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"{_kind(kind)}/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> str:
    return f'<path d="M{x1:.2f} {y1:.2f}L{x2:.2f} {y2:.2f}"{_kind(kind)}/>'


def dot(x: float, y: float, kind: str, radius: float = 2.0) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"{_kind(kind)}/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight arrow with its head at x2, y2."""
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length * 8, (y2 - y1) / length * 8
    wings = f"M{x2 - dx - dy / 2:.1f} {y2 - dy + dx / 2:.1f}L{x2:.1f} {y2:.1f}L{x2 - dx + dy / 2:.1f} {y2 - dy - dx / 2:.1f}"
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}{wings}" class="line"/>'


def curve(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line that leaves downwards and arrives from above."""
    middle = (y1 + y2) / 2
    return f'<path d="M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}" class="line"/>'


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from data to the drawing."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def x_axis(axis: Axis, y: float, top: float, ticks: Sequence[float], label: str) -> list[str]:
    """Grid lines from `top` to `y`, tick labels and the label of a horizontal axis."""
    parts = [line(axis(tick), top, axis(tick), y) for tick in ticks]
    parts += [text(axis(tick), y + 16, f"{tick:g}", "soft small mid") for tick in ticks]
    return [*parts, text((axis.start + axis.end) / 2, y + 36, label, "soft mid")]


def y_axis(axis: Axis, x: float, right: float, ticks: Sequence[float], label: str) -> list[str]:
    """Grid lines from `x` to `right`, tick labels and the label of a vertical axis."""
    parts = [line(x, axis(tick), right, axis(tick)) for tick in ticks]
    parts += [text(x - 6, axis(tick) + 4, f"{tick:g}", "soft small end") for tick in ticks]
    middle = (axis.start + axis.end) / 2
    turned = f'<text transform="translate({x - 46:g} {middle:g}) rotate(-90)" class="soft mid">{escape(label)}</text>'
    return [*parts, turned]


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
