"""`zloss recommend`: which Z-loss, if any, to use on one model, and how sure that is."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from zloss.decide.thresholds import Thresholds
from zloss.protocol.recommend.config import RecommendConfig
from zloss.results.named_path import recorded_command

if TYPE_CHECKING:
    from zloss.protocol.recommend.crew import Crew


@dataclass(frozen=True)
class Recommend:
    """Audit a model, train a few matched arms that the audit proposes, select one on the first seed and half of the validation
    text, confirm it on further seeds and the other half, and write one page: what to do, how sure, why, what it costs, what is
    not guaranteed, and the lines to paste. The same command resumes after an interruption.

    Example: zloss recommend smollm2 --text train.txt --valid-text valid.txt --budget 45m --out advice
    """

    config: Annotated[RecommendConfig, tyro.conf.arg(name="")] = field(default_factory=RecommendConfig)
    plan: bool = False
    """Only audit, and write the arms as settings for a trainer of your own (plan.json); --runs takes its runs."""
    out: str = "zloss-recommend"
    """Folder for recommendation.json, report.html, the audits and the runs."""
    force: bool = False
    """Replace the result of something else that the folder holds. A plan and runs of other settings are refused all the same."""
    json: bool = False
    """Print the result as JSON to stdout, and nothing else there."""
    quiet: bool = False
    """No progress and no page on the terminal."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.console import choose_notes
        from zloss.measure.bf16_products import limit_before_torch

        if self.config.precision == "bf16":
            limit_before_torch(choose_notes(self.quiet))

        from zloss.distributed import open_job
        from zloss.protocol.recommend.crew import Crew
        from zloss.results.folder import check_folder
        from zloss.results.folder_lock import locked_folder

        folder = Path(self.out)
        with open_job() as job:
            crew = Crew(job)
            try:
                if not job.first:
                    crew.follow()
                    return 0
                with crew.leading():
                    check_folder(folder)
                    with locked_folder(folder):
                        command = recorded_command(argv)
                        if self.plan:
                            return self._plan(folder, command, crew)
                        return self._recommend(folder, command, crew)
            except KeyboardInterrupt:
                if job.first:
                    print(
                        "interrupted: finished runs and checkpoints are kept; the same command goes on from there.",
                        file=sys.stderr,
                    )
                return 130

    def _recommend(self, folder: Path, command: str, crew: Crew) -> int:
        from zloss.console import choose_notes, choose_progress
        from zloss.protocol.recommend.paste import with_model_as_given
        from zloss.protocol.recommend.run import run_recommendation
        from zloss.report.files import write_recommendation
        from zloss.report.terminal.recommendation import print_recommendation
        from zloss.results.named_path import without_folders
        from zloss.train.step.live import choose_view

        found = run_recommendation(
            self.config,
            folder,
            thresholds=self.thresholds,
            force=self.force,
            progress=choose_progress(self.quiet),
            view=choose_view(self.quiet),
            say=choose_notes(self.quiet),
            command=command,
            crew=crew,
        )
        written = write_recommendation(folder, found)
        if self.json:
            print(json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False, indent=1))
        elif not self.quiet:
            # Only the files are free of folders: a line on the terminal is pasted where the command was typed.
            as_given = with_model_as_given(found.paste, without_folders(self.config.model), self.config.model)
            print_recommendation(replace(found, paste=as_given))
            print("\n".join(str(path) for path in written))
        return 0

    def _plan(self, folder: Path, command: str, crew: Crew) -> int:
        from zloss.console import choose_notes, choose_progress
        from zloss.protocol.recommend.run import make_plan
        from zloss.report.terminal.recommendation import print_plan
        from zloss.results.recommend_plan import FILE

        plan = make_plan(
            self.config,
            folder,
            thresholds=self.thresholds,
            progress=choose_progress(self.quiet),
            say=choose_notes(self.quiet),
            command=command,
            crew=crew,
        )
        if self.json:
            print(json.dumps(plan.to_dict(), ensure_ascii=False, allow_nan=False, indent=1))
        elif not self.quiet:
            print_plan(plan)
            print(folder / FILE)
        return 0
