"""The audit and the implementation audit of a recommendation, each made once and kept in its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zloss import __version__
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.implementation.config import ImplementationAuditConfig
from zloss.audit.implementation.run import run_implementation_audit
from zloss.console import Progress
from zloss.decide.decision_map import with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint
from zloss.protocol.recommend.crew import Crew
from zloss.results.audit import AuditReport
from zloss.results.files import read_record, write_record
from zloss.results.implementation_audit import FILE as IMPLEMENTATION_FILE
from zloss.results.implementation_audit import ImplementationAudit

AUDIT_FOLDER, IMPLEMENTATION_FOLDER = "audit", "implementation"
AUDIT_FILE = "report.json"
IDENTITY = "identity"
Kept = TypeVar("Kept", AuditReport, ImplementationAudit)


def kept_audit(
    config: AuditConfig,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    identity: str,
    thresholds: Thresholds,
    progress: Progress,
    command: str,
    crew: Crew,
) -> AuditReport:
    """The audit with its decisions; Ctrl-C during it ends the whole command."""

    def measure() -> AuditReport:
        return crew.audit(config, checkpoint, progress=progress, command=command)

    report = _kept(folder / AUDIT_FOLDER / AUDIT_FILE, AuditReport, f"{identity} {config}", measure)
    return with_decisions(report, thresholds=thresholds)


def kept_implementation_audit(
    config: ImplementationAuditConfig,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    identity: str,
    progress: Progress,
    command: str,
) -> ImplementationAudit:
    """Source, update and fp16 margin under the chosen arm."""

    def measure() -> ImplementationAudit:
        return run_implementation_audit(config, progress=progress, command=command, checkpoint=checkpoint)

    file = folder / IMPLEMENTATION_FOLDER / IMPLEMENTATION_FILE
    return _kept(file, ImplementationAudit, f"{identity} {config.methods} {config.coef:g} {config.precision}", measure)


def _kept(file: Path, record_type: type[Kept], identity: str, measure: Callable[[], Kept]) -> Kept:
    """The record in `file` where it is of the same identity and complete; a damaged file is made anew."""
    short = hashlib.sha256(f"{identity} {__version__}".encode()).hexdigest()[:16]
    if file.is_file():
        try:
            found = read_record(file, record_type)
        except InputError:
            found = None
        if found is not None and found.provenance.extra.get(IDENTITY) == short and found.status == "complete":
            return found
    made = measure()
    if made.status == "partial":
        raise KeyboardInterrupt
    extra = {**made.provenance.extra, IDENTITY: short}
    # A page tells nothing of the folders of a machine.
    named = replace(made.model, name=Path(made.model.name).name)
    made = replace(made, model=named, provenance=replace(made.provenance, extra=extra))
    write_record(file, made)
    return read_record(file, record_type)
