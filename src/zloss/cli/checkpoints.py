"""`zloss center` and `zloss drift`: a centered copy of a checkpoint, and what moved between the checkpoints of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.decide.drift import DriftLimits
from zloss.protocol.config import CenterConfig, DriftConfig
from zloss.results.provenance import recorded_command


@dataclass(frozen=True)
class Center:
    """Subtract the mean row from a model's output head, write the result as an ordinary checkpoint folder, and say whether to
    keep it. Up to the rounding of the stored dtype, probabilities stay the same and the mean logit of every token becomes zero,
    so logits stored in 16 bits can be more precise. The copy is reloaded and compared with the original before it is
    moved into place. The exit code is 1 if the copy should be discarded.

    Example: zloss center ./my_checkpoint --text valid.txt --out centered
    """

    config: Annotated[CenterConfig, tyro.conf.arg(name="")] = field(default_factory=CenterConfig)
    out: str = "zloss-centered"
    """Folder for the copy and centering.json."""
    force: bool = False
    """Replace the contents of the folder; the original is never touched."""
    quiet: bool = False
    """Do not print progress or the table."""

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
        return 1 if result.verdict is not None and result.verdict.action == "discard" else 0


@dataclass(frozen=True)
class Drift:
    """Audit every checkpoint of one run on the same text and report what moved while cross-entropy did not, and between
    which steps it began. Finished checkpoints are kept in --out and reused, so the same command resumes after an
    interruption. Example: zloss drift runs/big --text valid.txt --out drift"""

    config: Annotated[DriftConfig, tyro.conf.arg(name="")] = field(default_factory=DriftConfig)
    out: str = "zloss-drift"
    """Folder for drift.json, report.html and the figures; the audits of the checkpoints are kept in its checkpoints/."""
    figures: bool = True
    """Also write the figures as SVG and PNG files."""
    force: bool = False
    """Replace a different result that is already in the folder."""
    quiet: bool = False
    """Do not print progress or the table."""
    limits: Annotated[DriftLimits, tyro.conf.arg(name="")] = field(default_factory=DriftLimits)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.console import choose_notes, choose_progress
        from zloss.decide.answer import DecidedResults
        from zloss.protocol.drift import next_command, run_drift
        from zloss.report.document import Text
        from zloss.report.drift import drift_summary
        from zloss.report.files import write_result
        from zloss.report.terminal import print_document
        from zloss.results.folder import check_folder, locked_folder

        folder = Path(self.out)
        check_folder(folder)
        try:
            with locked_folder(folder):
                drift = run_drift(
                    self.config,
                    folder,
                    limits=self.limits,
                    force=self.force,
                    progress=choose_progress(self.quiet),
                    say=choose_notes(self.quiet),
                    command=recorded_command(argv),
                )
                written = write_result(folder, DecidedResults(drifts=(drift,)), figures=self.figures)
        except KeyboardInterrupt:
            print(
                "interrupted: finished checkpoints are kept; the same command resumes with the rest.", file=sys.stderr
            )
            return 130
        if not self.quiet:
            print_document(drift_summary(drift))
            print("\n".join(str(path) for path in written[:2]))
            command, why = next_command(drift, self.config, folder)
            print_document([Text(f"Next: {why}."), Text(command, "code", "strong")])
        return 0
