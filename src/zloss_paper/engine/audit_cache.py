"""Audits by their setting: each is made once, in this call or an earlier one, and shared by all recipes.

With a folder an audit is kept in OUT/audits under the fingerprint of its setting, its text and its weights. An interrupted
audit goes on after its last finished block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.console import Progress
from zloss.decide.decision_map import with_decisions
from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint
from zloss.results.audit import AuditReport
from zloss.results.files import read_record, write_record
from zloss_paper.engine.fingerprint import fingerprint, texts_by_content, weights_by_files

Extra = Callable[[], Mapping[str, Any]]
"""A further measurement, as plain JSON values."""


class AuditCache:
    """The audits of one call."""

    def __init__(self, folder: Path | None, progress: Progress, command: Callable[[], str]) -> None:
        self._folder = folder
        self._progress = progress
        self._command = command
        self._reports: dict[str, AuditReport] = {}
        self.made = 0
        """Audits that were run, not read."""

    def audit(
        self, config: AuditConfig, load: Callable[[], Checkpoint], extras: Mapping[str, Extra] | None = None
    ) -> AuditReport:
        """The report of `config`. `extras` are measured once, and kept under their names in the report's `extra`.

        Ctrl-C leaves what is finished in the folder.
        """
        key = audit_fingerprint(config)
        place = None if self._folder is None else self._folder / "audits" / key
        before = self._reports.get(key) or _kept(place)
        report = before or self._made(config, load(), place)
        for name, measure in (extras or {}).items():
            if name not in report.extra:
                report = replace(report, extra={**report.extra, name: dict(measure())})
        self._reports[key] = report
        if place is not None and report is not before:
            write_record(place / "report.json", report)
        return report

    def _made(self, config: AuditConfig, checkpoint: Checkpoint, place: Path | None) -> AuditReport:
        report = run_audit(
            config,
            folder=place,
            resume=True,
            progress=self._progress,
            command=self._command(),
            checkpoint=checkpoint,
        )
        self.made += 1
        if report.status == "partial":
            raise KeyboardInterrupt
        return with_decisions(report)


def audit_fingerprint(config: AuditConfig) -> str:
    """Identity of an audit's numbers: every setting, the texts by content, the weights, the version of zloss."""
    settings = asdict(config) | {"texts": texts_by_content(config.texts), "weights": weights_by_files(config.model)}
    return fingerprint(settings)


def _kept(place: Path | None) -> AuditReport | None:
    file = None if place is None else place / "report.json"
    if file is None or not file.is_file():
        return None
    try:
        return read_record(file, AuditReport)
    except InputError:  # cut off, or of another version: it is made again
        return None
