"""What recipes share while they run: audits and training runs by their setting, the model that is loaded, progress.

An audit that two recipes ask for runs once. With a folder it is also kept there, under the fingerprint of its setting,
its text and its weights, and an interrupted one goes on after its last finished block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

import zloss
from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.console.progress import Progress, Silent
from zloss.decide.decision_map import with_decisions
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import find_head
from zloss.results.audit import AuditReport
from zloss.results.writing import write_json
from zloss.text.blocks import Blocks, make_blocks
from zloss.text.corpus import open_corpus
from zloss_paper.engine.deployed import deployed_perplexity
from zloss_paper.training.runs import TrainingRuns

DEPLOYED = "deployed_ppl"
"""Key of the deployed perplexities among the extras of a kept report."""


class Workbench:
    """Audits, each made once."""

    def __init__(
        self, folder: Path | None = None, *, progress: Progress | None = None, command: str = "zloss reproduce"
    ) -> None:
        self.folder = folder
        self.progress = progress or Silent()
        self.command = command
        self.audits_run = 0
        self._reports: dict[str, AuditReport] = {}
        self._loaded: tuple[str, Checkpoint] | None = None
        self.trainings = TrainingRuns(self)

    def audit(self, config: AuditConfig, *, deployed: bool = False) -> AuditReport:
        """The report of `config`, with deployed perplexities on request; Ctrl-C leaves what is finished in the folder."""
        key = _fingerprint(config)
        place = None if self.folder is None else self.folder / "audits" / key
        report = self._reports.get(key) or _kept(place)
        before = report
        if report is None:
            report = run_audit(
                config,
                folder=place,
                resume=True,
                progress=self.progress,
                command=self.command,
                checkpoint=self.checkpoint(config),
            )
            self.audits_run += 1
            if report.status == "partial":
                raise KeyboardInterrupt
            report = with_decisions(report)
        if deployed and DEPLOYED not in report.extra:
            checkpoint = self.checkpoint(config)
            found = deployed_perplexity(checkpoint, text_blocks(config, checkpoint), self.progress)
            report = replace(report, extra={**report.extra, DEPLOYED: asdict(found)})
        self._reports[key] = report
        if place is not None and report is not before:
            write_json(place / "report.json", report.to_dict())
        return report

    def hidden(self, config: AuditConfig) -> Tensor:
        """What the output head receives, for every prediction of the audit's text: [T, D]."""
        checkpoint = self.checkpoint(config)
        blocks = text_blocks(config, checkpoint)
        parts = []
        with (
            torch.no_grad(),
            hidden_states(checkpoint, find_head(checkpoint)) as hidden_of,
            self.progress.step("hidden states", blocks.predictions) as step,
        ):
            for start in range(0, blocks.count, config.batch_blocks):
                stop = min(start + config.batch_blocks, blocks.count)
                parts.append(blocks.counted(hidden_of(blocks.inputs(start, stop))).flatten(0, 1))
                step.advance((stop - start) * blocks.size)
        return torch.cat(parts)

    def checkpoint(self, config: AuditConfig) -> Checkpoint:
        """The model of `config`; one at a time stays loaded."""
        key = json.dumps([config.model, config.dtype, config.trust_remote_code, config.allow_pickle])
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            with self.progress.step(f"loading {Path(config.model).name}", None):
                loaded = load_checkpoint(
                    config.model,
                    dtype=config.dtype,
                    trust_remote_code=config.trust_remote_code,
                    allow_pickle=config.allow_pickle,
                )
            self._loaded = (key, loaded)
        return self._loaded[1]


def text_blocks(config: AuditConfig, checkpoint: Checkpoint) -> Blocks:
    """The blocks of the audit's text, as the checkpoint's tokenizer cuts it."""
    return make_blocks(
        open_corpus(config.texts, config.corpus, config.text_field),
        checkpoint.tokenizer,
        size=config.block_size,
        count=config.blocks,
        bos_id=checkpoint.bos_id(config.bos),
        offset=config.offset,
    )


def _kept(place: Path | None) -> AuditReport | None:
    file = None if place is None else place / "report.json"
    if file is None or not file.is_file():
        return None
    try:
        return AuditReport.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError:  # also our own InputError: cut off, or of another version; it is made again
        return None


def _fingerprint(config: AuditConfig) -> str:
    """Identity of an audit's numbers: every setting, the text, the weights (by size and time of their files), the code."""
    # Texts count by content, so that a moved file is still the same text.
    settings = asdict(replace(config, texts=tuple(Path(text).name for text in config.texts)))
    digest = hashlib.sha256(json.dumps([zloss.__version__, settings], sort_keys=True).encode())
    for text in config.texts:
        if Path(text).is_file():
            digest.update(Path(text).read_bytes())
    for file in _weight_files(Path(config.model)):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _weight_files(model: Path) -> Iterator[Path]:
    if model.is_file():
        yield model
    elif model.is_dir():
        yield from sorted(file for file in model.iterdir() if file.is_file())
