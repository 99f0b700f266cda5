"""Router entropy and expert load over the steps of compared runs, as one SVG file: a line per variant, a panel per quantity.

Seeds are averaged step by step. Matched variants lie on the line of the token-layer mean, so they are dashed.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zloss.errors import MissingDependencyError
from zloss.report.charts.matplotlib_files import STYLE
from zloss.report.charts.training import COLOURS
from zloss.results.writing import write_bytes

PANELS = {"entropy": "router entropy (nat)", "load_cv": "expert load CV"}
MATCHED = ":matched"
"""How the name of a variant says that its coefficient was matched."""


@dataclass(frozen=True)
class RouterFigure:
    """The averaged curves."""

    curves: dict[str, dict[str, list[float]]]
    """variant → quantity → value of every step."""

    def save(self, file: Path) -> Path:
        """Draw and write; the same curves give the same bytes."""
        try:
            from matplotlib import pyplot, rc_context
        except ImportError as error:
            raise MissingDependencyError("matplotlib", "Drawing figure files", "audit") from error
        with rc_context(STYLE):
            figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9.5, 3.4))
            for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
                self._panel(axis, name, label)
            axes[0].legend(fontsize=7, frameon=False)
            content = io.BytesIO()
            figure.savefig(content, format="svg", metadata={"Date": None})
            pyplot.close(figure)
        write_bytes(file, content.getvalue())
        return file

    def _panel(self, axis: Any, name: str, label: str) -> None:
        for i, (variant, quantities) in enumerate(self.curves.items()):
            values = quantities[name]
            dashed = MATCHED in variant
            style: dict[str, Any] = {
                "linestyle": (2 * i, (4, 4)) if dashed else "-",
                "linewidth": 1.6 if dashed else 1.1,
            }
            axis.plot(range(1, len(values) + 1), values, color=COLOURS[i % len(COLOURS)], label=variant, **style)
        axis.set_xlabel("step")
        axis.set_ylabel(label)
