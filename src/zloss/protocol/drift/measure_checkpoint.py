"""One checkpoint: loaded, recognised as measured already or audited, and kept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zloss import __version__
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.console import Progress
from zloss.decide.decision_map import with_decisions
from zloss.errors import InputError
from zloss.measure.block_values import DRIFT_TAILS, BlockValues
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import load_checkpoint, model_fingerprint
from zloss.protocol.drift.config import LEAST_BLOCKS, LEAST_TOKENS, DriftConfig
from zloss.protocol.drift.places import Place
from zloss.results.audit import AuditReport
from zloss.results.coordinate import Coordinate
from zloss.results.drift import KEPT_FILE, DriftCheckpoint, DriftNumbers, KeptCheckpoint
from zloss.results.files import read_record, write_record
from zloss.results.validation_blocks import ValidationBlocks
from zloss.text import Blocks, open_corpus

FOLDER = "checkpoints"
AUDIT_FILE = "report.json"


def measure_checkpoint(
    place: Place, config: DriftConfig, folder: Path, *, progress: Progress, command: str
) -> tuple[KeptCheckpoint, bool]:
    """(the finished checkpoint, whether it was measured already); Ctrl-C during its audit ends the whole command.

    `folder` is that of the whole measurement: the audit is kept in `checkpoints/NAME` inside it.
    """
    with progress.step(f"loading {place.name}", None):
        checkpoint = load_checkpoint(
            place.model,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            allow_pickle=config.allow_pickle,
            revision=place.revision,
        )
        corpus = open_corpus(config.texts, config.corpus, config.text_field)
        cut = model_blocks(
            checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
        )
        blocks, audit = cut.blocks, replace(config.audit(place.name), block_size=cut.blocks.size)
        _check_size(blocks, corpus.name)
        weights = model_fingerprint(checkpoint)
    identity = _identity(audit, blocks, weights)
    kept_in = folder / FOLDER / re.sub(r"[^\w.-]+", "-", place.name)
    kept = _kept(kept_in / KEPT_FILE, identity, place)
    if kept is not None:
        return kept, True
    values = BlockValues(blocks.count, blocks.size, tails=DRIFT_TAILS)
    report = run_audit(audit, progress=progress, command=command, checkpoint=checkpoint, by_block=values)
    if report.status == "partial":
        raise KeyboardInterrupt
    kept = _finished(place, report, values.record(), identity, blocks.fingerprint(), weights)
    kept = replace(kept, notes=cut.notes)
    write_record(kept_in / AUDIT_FILE, with_decisions(report))
    # Last: its presence says that the checkpoint is finished.
    write_record(kept_in / KEPT_FILE, kept)
    return kept, False


def _check_size(blocks: Blocks, name: str) -> None:
    if blocks.count < LEAST_BLOCKS or blocks.predictions < LEAST_TOKENS:
        raise InputError(
            f"the text {name!r} gives {blocks.count} blocks of {blocks.size}, but at least {LEAST_BLOCKS} blocks and "
            f"{LEAST_TOKENS} tokens are needed: use a longer text."
        )


def _identity(audit: AuditConfig, blocks: Blocks, weights: str) -> str:
    tokens = audit.fingerprint(blocks.fingerprint())
    return f"{weights}-{tokens}-{audit.gradient_blocks}-{__version__}"


def _kept(file: Path, identity: str, place: Place) -> KeptCheckpoint | None:
    """The kept checkpoint where it is of the same weights, text and settings; a damaged file is measured anew."""
    if not file.is_file():
        return None
    try:
        found = read_record(file, KeptCheckpoint)
    except InputError:
        return None
    same = found.identity == identity and found.checkpoint.step == place.step
    return found if same else None


def _finished(
    place: Place, report: AuditReport, blocks: ValidationBlocks, identity: str, tokens: str, weights: str
) -> KeptCheckpoint:
    plain = report.finite()
    known = [(mean, count) for mean, count in zip(blocks.ce, blocks.tokens, strict=True) if mean is not None]
    whole = len(known) == len(blocks.ce)
    checkpoint = DriftCheckpoint(
        name=place.name,
        step=place.step,
        weights=weights,
        vocab=plain.model.vocab,
        width=plain.model.width,
        ce=sum(mean * count for mean, count in known) / sum(count for _, count in known) if whole else None,
        ppl=plain.ppl,
        raw=_numbers(plain, "raw"),
        centered=_numbers(plain, "centered"),
    )
    return KeptCheckpoint(identity, tokens, plain.corpus.name, checkpoint, blocks)


def _numbers(report: AuditReport, coordinate: Coordinate) -> DriftNumbers:
    head = getattr(report.heads, coordinate)
    gradient = None if report.gradient is None else getattr(report.gradient, coordinate)
    return DriftNumbers(
        mu_abs_99=head.mu_abs_99,
        mu_rms=head.mu_rms,
        p_z_999=head.p_z_999,
        a_p_99=head.a_p_99,
        sigma_1=head.sigma_1,
        e_1=head.e_1,
        r_z=None if gradient is None else gradient.r_z,
    )
