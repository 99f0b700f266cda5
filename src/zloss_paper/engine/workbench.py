"""What recipes share while they run: audits and training runs by their setting, the model that is loaded, progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from zloss.audit.checkpoint.config import AuditConfig
from zloss.console import Progress, Silent
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import find_head, hidden_states
from zloss.results.audit import AuditReport
from zloss.text import Blocks, open_corpus
from zloss_paper.engine.audit_cache import AuditCache, Extra
from zloss_paper.engine.run_cache import RunCache

Result = TypeVar("Result")


class Workbench:
    """One call of `zloss reproduce`: what two recipes of it ask for is made once."""

    def __init__(
        self, folder: Path | None = None, *, progress: Progress | None = None, command: str = "zloss reproduce"
    ) -> None:
        self.folder = folder
        self.progress = progress or Silent()
        self.command = command
        """The command line that provenance names; it changes from recipe to recipe."""
        self.runs = RunCache(folder, self.progress, lambda: self.command)
        self.audits = AuditCache(folder, self.progress, lambda: self.command)
        self._loaded: tuple[str, Checkpoint] | None = None
        self._results: dict[tuple[Any, ...], Any] = {}

    def audit(self, config: AuditConfig, extras: Mapping[str, Extra] | None = None) -> AuditReport:
        """The report of `config`, with the named further measurements in its `extra`."""
        return self.audits.audit(config, lambda: self.checkpoint(config), extras)

    def once(self, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
        """What `make` returns, kept in memory the first time `key` is asked for."""
        if key not in self._results:
            self._results[key] = make()
        result: Result = self._results[key]
        return result

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
    corpus = open_corpus(config.texts, config.corpus, config.text_field)
    return model_blocks(
        checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos, offset=config.offset
    ).blocks
