"""What every part of one recommendation shares: its settings, its folder, and how it shows what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zloss.console import Progress, Silent
from zloss.decide.thresholds import Thresholds
from zloss.protocol.recommend.config import RecommendConfig
from zloss.protocol.recommend.crew import Crew
from zloss.protocol.recommend.stopwatch import Stopwatch
from zloss.train.step.live import LiveView, NoView

RUNS_FOLDER = "runs"


@dataclass(frozen=True)
class Session:
    """One command on one folder."""

    config: RecommendConfig
    folder: Path
    stopwatch: Stopwatch
    thresholds: Thresholds = field(default_factory=Thresholds)
    progress: Progress = field(default_factory=Silent)
    view: LiveView = field(default_factory=NoView)
    say: Callable[[str], None] = lambda text: None
    crew: Crew = field(default_factory=Crew)
    command: str = "zloss.protocol.recommend.run.run_recommendation"

    @property
    def runs_folder(self) -> Path:
        """Folders of runs, as `zloss train` writes them; `zloss compare` reads them."""
        return self.folder / RUNS_FOLDER
