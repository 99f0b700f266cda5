"""`zloss recommend`, `zloss center` and `zloss drift`: the commands that run an experiment of several steps on checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zloss.decide.drift import DriftLimits
from zloss.decide.thresholds import Thresholds
from zloss.protocol.config import CenterConfig, DriftConfig, RecommendConfig
from zloss.results.provenance import recorded_command

if TYPE_CHECKING:
    from zloss.results.recommendation import Recommendation, RecommendPlan


@dataclass(frozen=True)
class Recommend:
    """Find out which Z-loss, if any, helps one model. The command audits the model, trains a few short matched runs that the
    audit proposes, selects one on the first seed and half of the validation text, confirms it on fresh seeds and the other half,
    and writes one page: what to do, why, how sure, and the lines to paste. The same command resumes after an interruption.

    Example: zloss recommend smollm2 --text train.txt --valid-text valid.txt --budget 45m --out advice
    """

    config: Annotated[RecommendConfig, tyro.conf.arg(name="")] = field(default_factory=RecommendConfig)
    plan: bool = False
    """Only audit, and write the arms as settings for your own trainer (plan.json); --runs then takes its runs."""
    out: str = "zloss-recommend"
    """Folder for recommendation.json, report.html, the audits and the runs."""
    force: bool = False
    """Replace a different result that is already in the folder. A plan or runs with other settings are still rejected."""
    json: bool = False
    """Print only the result, as JSON, to stdout."""
    quiet: bool = False
    """Do not print progress or the summary."""
    verbose: bool = False
    """Also print the arms, the confirmation, the stages and the lines for every framework."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.console import choose_notes
        from zloss.measure.bf16_products import limit_before_torch

        if self.config.precision == "bf16":
            limit_before_torch(choose_notes(self.quiet))

        from zloss.console import choose_progress
        from zloss.jobs import open_job
        from zloss.protocol.recommend import make_plan, run_recommendation
        from zloss.results.folder import check_folder, locked_folder
        from zloss.train.live import choose_view

        folder = Path(self.out)
        with open_job() as job, ExitStack() as held:
            quiet = self.quiet or not job.first
            shared: dict[str, Any] = {
                "thresholds": self.thresholds,
                "progress": choose_progress(quiet),
                "say": choose_notes(quiet),
                "command": recorded_command(argv),
                "job": job,
            }
            try:
                job.from_first(check_folder, folder)
                job.from_first(lambda: held.enter_context(locked_folder(folder)))
                if self.plan:
                    plan = make_plan(self.config, folder, **shared)
                    if job.first:
                        self._show_plan(plan, folder)
                    return 0
                found = run_recommendation(self.config, folder, force=self.force, view=choose_view(quiet), **shared)
                if job.first:
                    self._write(found, folder, argv)
            except KeyboardInterrupt:
                if job.first:
                    print(
                        "interrupted: finished runs and checkpoints are kept; the same command resumes from there.",
                        file=sys.stderr,
                    )
                return 130
        return 0

    def _show_plan(self, plan: RecommendPlan, folder: Path) -> None:
        from zloss.report.recommendation import plan_summary
        from zloss.report.terminal import print_document
        from zloss.results.recommendation import PLAN_FILE

        if self.json:
            print(json.dumps(plan.to_dict(), ensure_ascii=False, allow_nan=False, indent=1))
        elif not self.quiet:
            print_document(plan_summary(plan))
            print(folder / PLAN_FILE)

    def _write(self, found: Recommendation, folder: Path, argv: Sequence[str]) -> None:
        from zloss.decide.answer import DecidedResults
        from zloss.protocol.recommend_answer import next_command, with_model_as_given
        from zloss.report.document import Text
        from zloss.report.files import write_result
        from zloss.report.recommendation import recommendation_summary
        from zloss.report.terminal import print_document
        from zloss.results.provenance import without_folders

        written = write_result(folder, DecidedResults(recommendations=(found,)))
        if self.json:
            print(json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False, indent=1))
        elif not self.quiet:
            # Only the files are free of folders: a line on the terminal is pasted where the command was typed.
            as_given = with_model_as_given(found.paste, without_folders(self.config.model), self.config.model)
            print_document(recommendation_summary(replace(found, paste=as_given), verbose=self.verbose))
            print("\n".join(str(path) for path in written))
            command, why = next_command(found, self.config, argv, self.out)
            print_document([Text(f"Next: {why}."), Text(command, "code", "strong")])


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
