"""`zloss audit`: what Z-loss would do to this checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from zloss.audit.checkpoint.config import AuditConfig
from zloss.decide.answer import AuditedInput, next_command
from zloss.decide.thresholds import Thresholds
from zloss.results.provenance import recorded_command


@dataclass(frozen=True)
class Audit:
    """Measure common shift, log-normalizer tail and output-to-hidden gain of a language model on a text, raw and centered,
    and say what to do about them. Without arguments: the embedded SmolLM2-135M on an English text that ships with Python.

    Example: zloss audit ./my_checkpoint --text valid.txt --out audit
    """

    config: Annotated[AuditConfig, tyro.conf.arg(name="")] = field(default_factory=AuditConfig)
    out: str = "zloss-audit"
    """Folder for report.json, report.html, tokens.parquet and the figures."""
    figures: bool = True
    """Also write the figures as SVG and PNG files."""
    force: bool = False
    """Replace the result of something else that the folder holds."""
    quiet: bool = False
    """No progress and no table."""
    resume: bool = False
    """Resume an interrupted audit in the same folder after its last finished part."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = field(default_factory=Thresholds)

    def run(self, argv: Sequence[str]) -> int:
        from zloss.audit.checkpoint.run import run_audit_of
        from zloss.console import choose_progress
        from zloss.decide.answer import DecidedResults
        from zloss.decide.decision_map import with_decisions
        from zloss.jobs import open_job
        from zloss.report.audit import audit_summary
        from zloss.report.document import Text
        from zloss.report.files import write_result
        from zloss.report.terminal import print_document
        from zloss.results.folder import Owner, check_folder, locked_folder, place_of, refuse_other, text_name

        folder = Path(self.out)
        text = text_name(self.config.texts, self.config.corpus)
        with open_job() as job, ExitStack() as held:
            job.from_first(check_folder, folder)
            job.from_first(
                lambda: refuse_other(
                    folder, Owner("audit", self.config.model, text, place_of(self.config.model)), force=self.force
                )
            )
            job.from_first(lambda: held.enter_context(locked_folder(folder)))
            found = run_audit_of(
                job,
                self.config,
                folder=folder,
                resume=self.resume or job.restarted,
                progress=choose_progress(self.quiet or not job.first),
                command=recorded_command(argv),
            )
            if found is None:
                return 0
            report = with_decisions(found.report, thresholds=self.thresholds)
            written = write_result(folder, DecidedResults(audits=(report,)), figures=self.figures)
        if not self.quiet:
            print_document(audit_summary(report))
            print("\n".join(str(path) for path in written[:2]))
            command = next_command(report, self._audited_input(argv))
            print_document([Text(f"Next: {command.why}."), Text(command.line, "code", "strong")])
        if report.status == "partial":
            print("interrupted: the report covers what was finished; `--resume` continues from there.", file=sys.stderr)
            return 130
        return 0

    def _audited_input(self, argv: Sequence[str]) -> AuditedInput:
        config = self.config
        return AuditedInput(
            model=config.model,
            texts=config.texts,
            corpus=config.corpus,
            valid_vocab=config.valid_vocab,
            dtype=config.dtype,
            argv=tuple(argv),
        )
