"""At which scale a recipe runs, and what a user may put in place of the paper's settings."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.results.reproduction import Profile as Profile


@dataclass(frozen=True)
class Overrides:
    """The user's own models and texts; everything else of a recipe stays."""

    models: tuple[str, ...] = ()
    """NAME=FOLDER takes a model of the paper from a folder, NAME alone selects it; anything else is a model of its own."""
    texts: tuple[str, ...] = ()
    text_source: str = ""
    blocks: int | None = None
    block_size: int | None = None
    reports: tuple[str, ...] = ()
    """Results to read instead of running anything (the reporting checklist)."""
