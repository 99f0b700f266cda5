"""The files of a reproduction: its record, its page and its figures."""

from __future__ import annotations

import os
from pathlib import Path

from zloss.report.tables.reproduction_markdown import reproduction_markdown
from zloss.results.reproduction import write_reproduction_record
from zloss.results.writing import write_text
from zloss_paper.engine.reproduction import Reproduction


def write_reproduction(folder: Path, result: Reproduction) -> list[Path]:
    """LABEL.json, LABEL.md and the figures of the recipe, if it has some."""
    record, page = folder / f"{result.recipe.stem}.json", folder / f"{result.recipe.stem}.md"
    figures = list(result.draw(folder / "figures")) if result.draw is not None else []
    plain = result.record()
    write_reproduction_record(record, plain)
    write_text(page, reproduction_markdown(plain, [Path(os.path.relpath(figure, folder)) for figure in figures]))
    return [record, page, *figures]
