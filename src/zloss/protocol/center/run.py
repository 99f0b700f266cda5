"""One centering: load, plan, write, load again, compare, and only then put the copy in its place."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from zloss.audit.checkpoint.config import AuditConfig
from zloss.console import Progress, Silent
from zloss.errors import CheckpointError, OutputError
from zloss.measure.measurement import resolve_vocab
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import load_checkpoint
from zloss.models.output_head import find_head
from zloss.protocol.center.change import plan_change, refuse_uncenterable
from zloss.protocol.center.config import CenterConfig
from zloss.protocol.center.source_folder import refuse_overlap, source_folder
from zloss.protocol.center.verify import greedy_continuation, measure_model
from zloss.protocol.center.weight_files import read_weight_files
from zloss.protocol.center.write import findings_of, write_card, write_model
from zloss.results.centering import FILE, Centering
from zloss.results.folder import check_folder
from zloss.results.folder_lock import LOCK_FILE, locked_folder
from zloss.results.folder_writing import whole_folder
from zloss.results.named_path import without_folders
from zloss.results.provenance import Provenance, shared_keys
from zloss.results.record import to_plain
from zloss.results.unfinished import remove_abandoned
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
    """Write the centered copy of a checkpoint to `folder` and measure what changed.

    The copy is made and measured in a temporary folder next to `folder` and renamed at the end, so `folder` never holds a copy
    that was not measured. A killed run leaves only that temporary folder, which the next run removes.
    """
    out = Path(os.path.realpath(folder))
    refuse_overlap(out, [Path(name) for name in (config.model, *config.texts) if os.path.exists(name)])
    _refuse_folder(out, force)
    with source_folder(config.model) as source:
        refuse_overlap(out, [source])
        with locked_folder(out):
            # Again: another process may have filled it before this one got the lock.
            _refuse_filled(out, force)
            return _center(config, source, out, progress or Silent(), command)


def _center(config: CenterConfig, source: Path, out: Path, progress: Progress, command: str) -> Centering:
    started, begin = datetime.now(UTC), time.perf_counter()
    with progress.step(f"loading {config.model}", None):
        before = load_checkpoint(str(source), allow_pickle=None)
    head = find_head(before)
    refuse_uncenterable(before, head)
    valid_vocab = resolve_vocab(config.valid_vocab, head.vocab, len(before.tokenizer))
    files = read_weight_files(source)
    change = plan_change(before, head, files, keep_tied=config.keep_tied, valid_vocab=valid_vocab)
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
        valid_vocab=valid_vocab,
    )
    numbers_before = measure_model(audit, before, blocks, progress)
    greedy_before = greedy_continuation(before, blocks)
    with whole_folder(out) as part:
        with progress.step(f"writing {out.name}", None):
            write_model(files, change, part)
        after = load_checkpoint(str(part))
        numbers_after = measure_model(replace(audit, model=str(part)), after, blocks, progress)
        greedy_equal = bool(torch.equal(greedy_before, greedy_continuation(after, blocks)))
        if numbers_before.ppl is None or numbers_after.ppl is None:
            raise CheckpointError(
                f"the perplexity of {config.model} is not finite on this text: nothing can be compared."
            )
        gap = abs(numbers_after.ppl - numbers_before.ppl) / numbers_before.ppl
        changed = (*change.replaced.values(), *change.added.values())
        result = Centering(
            model=without_folders(config.model),
            corpus=corpus.name,
            predictions=blocks.predictions,
            tied_before=head.tied,
            tied_after=head.tied and config.keep_tied,
            extra_bytes=change.extra_bytes,
            stored_dtype=", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in changed})),
            vocab=head.vocab,
            valid_vocab=valid_vocab,
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
        result = replace(result, findings=findings_of(result, PPL_AGREEMENT))
        write_json(part / FILE, {"schema": Centering.SCHEMA, **to_plain(result)})
        write_card(files.folder, part, result)
    return result


def _refuse_folder(out: Path, force: bool) -> None:
    """An error, before the work starts, where `out` cannot be replaced by the finished copy."""
    check_folder(out)
    check_folder(out.parent)
    # Here too: a run that was killed after its copy was in place is followed by one that is refused.
    remove_abandoned(out.parent)
    _refuse_filled(out, force)
    here = Path.cwd()
    if os.path.ismount(out) or out in (here, *here.parents):
        raise OutputError(
            f"{out} is a mount point, or the folder that this command runs in: a finished copy is renamed to its place, so "
            "choose a folder inside it."
        )


def _refuse_filled(out: Path, force: bool) -> None:
    # A killed run leaves its lock file.
    if not force and out.is_dir() and any(path.name != LOCK_FILE for path in out.iterdir()):
        raise OutputError(f"{out} is not empty: choose another folder, or pass `force` to replace what it holds.")
