"""report.html of a comparison: verdicts and metrics, the stages of the decision map, training curves and tails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zloss.report.html import Page, render_page
from zloss.report.writing import write_text
from zloss.train.finished_run import FinishedRun
from zloss.train.training_figures import training_section

END = "<footer>"
"""Where the content of a page ends."""


def write_comparison_page(folder: Path, data: dict[str, Any], runs: Sequence[FinishedRun]) -> Path:
    """The page beside comparison.json; the curves come from the step records, which comparison.json does not repeat."""
    place = folder / "report.html"
    before, end, after = render_page(Page(comparisons=(data,))).rpartition(END)
    write_text(place, before + training_section(runs) + end + after)
    return place
