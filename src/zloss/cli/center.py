"""`zloss center`: the row-centered head as a checkpoint that anyone can load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.protocol.config import CenterConfig
from zloss.results.provenance import recorded_command


@dataclass(frozen=True)
class Center:
    """Subtract the mean row from a model's output head and write the result as an ordinary checkpoint folder. Up to the rounding
    of the stored dtype, probabilities and cross-entropy stay and the mean logit of every token becomes zero. The copy is loaded
    again and compared with the original before it appears; its model card says what was measured.

    Example: zloss center ./my_checkpoint --text valid.txt --out centered
    """

    config: Annotated[CenterConfig, tyro.conf.arg(name="")] = field(default_factory=CenterConfig)
    out: str = "zloss-centered"
    """Folder for the copy and centering.json."""
    force: bool = False
    """Replace what the folder holds; never the original."""
    quiet: bool = False
    """No progress and no table."""

    def run(self, argv: Sequence[str]) -> int:
        from zloss.console import choose_progress
        from zloss.protocol.center import center_checkpoint
        from zloss.report.centering import centering_summary
        from zloss.report.terminal import print_document

        folder = Path(self.out)
        result = center_checkpoint(
            self.config, folder, force=self.force, progress=choose_progress(self.quiet), command=recorded_command(argv)
        )
        if not self.quiet:
            print_document(centering_summary(result, str(folder)))
        return 0 if result.verified else 1
