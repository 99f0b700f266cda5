"""One centering: load, plan, write, load again, compare."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from zloss.audit.checkpoint.config import AuditConfig
from zloss.console import Progress, Silent
from zloss.errors import CheckpointError, OutputError
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import load_checkpoint
from zloss.models.output_head import find_head
from zloss.protocol.center.change import plan_change, refuse_uncenterable
from zloss.protocol.center.config import CenterConfig
from zloss.protocol.center.source_folder import source_folder
from zloss.protocol.center.verify import greedy_continuation, measure_model
from zloss.protocol.center.weight_files import read_weight_files
from zloss.protocol.center.write import write_centered
from zloss.results.centering import FILE, Centering
from zloss.results.named_path import without_folders
from zloss.results.provenance import Provenance, shared_keys
from zloss.results.record import to_plain
from zloss.results.writing import write_json
from zloss.text import open_corpus

PPL_AGREEMENT = 1e-6
"""Largest relative difference of PPL that is only rounding for fp32 weights; a 16-bit head is rounded once more."""


def center_checkpoint(
    config: CenterConfig,
    folder: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    command: str = "center_checkpoint",
) -> Centering:
    """Write the centered copy of a checkpoint to `folder` and measure what changed."""
    progress = progress or Silent()
    started, begin = datetime.now(UTC), time.perf_counter()
    if folder.exists() and any(folder.iterdir()) and not force:
        raise OutputError(f"{folder} is not empty: choose another folder, or pass `force` to replace what it holds.")
    with source_folder(config.model) as source:
        with progress.step(f"loading {config.model}", None):
            before = load_checkpoint(str(source))
        head = find_head(before)
        refuse_uncenterable(before, head)
        files = read_weight_files(source)
        change = plan_change(before, head, files, keep_tied=config.keep_tied, valid_vocab=config.valid_vocab)
        corpus = open_corpus(config.texts, config.corpus, "text")
        cut = model_blocks(before, corpus, size=config.block_size, count=config.blocks)
        blocks = cut.blocks
        audit = AuditConfig(
            model=config.model,
            texts=config.texts,
            corpus=config.corpus,
            blocks=config.blocks,
            block_size=blocks.size,
            gradient_blocks=0,
        )
        numbers_before = measure_model(audit, before, blocks, progress)
        greedy_before = greedy_continuation(before, blocks)
        with progress.step(f"writing {folder.name}", None):
            write_centered(files, change, folder, without_folders(config.model))
    stored = {
        str(tensor.dtype).removeprefix("torch.") for tensor in (*change.replaced.values(), *change.added.values())
    }
    after = load_checkpoint(str(folder))
    numbers_after = measure_model(replace(audit, model=str(folder)), after, blocks, progress)
    greedy_equal = bool(torch.equal(greedy_before, greedy_continuation(after, blocks)))
    if numbers_before.ppl is None or numbers_after.ppl is None:
        raise CheckpointError(f"the perplexity of {config.model} is not finite on this text: nothing can be compared.")
    gap = abs(numbers_after.ppl - numbers_before.ppl) / numbers_before.ppl
    result = Centering(
        model=without_folders(config.model),
        corpus=corpus.name,
        predictions=blocks.predictions,
        tied_before=head.tied,
        tied_after=head.tied and config.keep_tied,
        extra_bytes=change.extra_bytes,
        stored_dtype=", ".join(sorted(stored)),
        mean_row_norm=change.mean_row_norm,
        mean_bias=change.mean_bias,
        before=numbers_before,
        after=numbers_after,
        ppl_relative_difference=gap,
        greedy_tokens=len(greedy_before),
        greedy_equal=greedy_equal,
        verified=greedy_equal and gap <= PPL_AGREEMENT,
        notes=cut.notes,
        provenance=Provenance(**shared_keys(command, started, time.perf_counter() - begin)),
    )
    write_json(folder / FILE, {"schema": Centering.SCHEMA, **to_plain(result)})
    return result
