"""One centering: load, plan, write, load again, compare, and only then put the copy in its place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.checkpoint.run import run_audit
from zloss.console import Progress, Silent
from zloss.errors import CheckpointError, OutputError
from zloss.measure.measurement import model_blocks, resolve_vocab
from zloss.models.checkpoint import (
    SMOLLM2_HUB,
    Checkpoint,
    check_folder_exists,
    check_gguf_exists,
    check_not_adapter,
    embedded_smollm2,
    hub_options,
    load_checkpoint,
    not_found,
)
from zloss.models.gguf import converted_gguf
from zloss.models.output_head import find_head, hidden_states
from zloss.protocol.center_files import (
    WeightFiles,
    findings_of,
    plan_change,
    refuse_uncenterable,
    write_card,
    write_model,
)
from zloss.protocol.config import CenterConfig
from zloss.results.centering import FILE, Centering, CenteringNumbers
from zloss.results.folder import LOCK_FILE, check_folder, locked_folder, whole_folder
from zloss.results.io import remove_abandoned, write_json
from zloss.results.options import SMOLLM2
from zloss.results.provenance import Provenance, shared_keys, without_folders
from zloss.results.record import to_plain
from zloss.text import Blocks, open_corpus

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")
"""Files of a hub snapshot that a copy needs."""
CHUNK = 128
"""Tokens whose logits are held at once."""
GREEDY_TOKENS = 64
PROMPT_TOKENS = 16
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
    files = WeightFiles(source)
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
            extra_bytes=sum(tensor.nbytes for tensor in change.added.values()),
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


# Where it may read and write


@contextlib.contextmanager
def source_folder(name: str) -> Iterator[Path]:
    """A folder in the Hugging Face format with safetensors weights: a local one, a converted GGUF file, or a hub snapshot."""
    gguf = embedded_smollm2() if name == SMOLLM2 else Path(name) if name.endswith(".gguf") else None
    if gguf is not None:
        check_gguf_exists(gguf)
        with converted_gguf(gguf) as (folder, _wants_bos):
            yield folder
        return
    if Path(name).is_dir():
        yield Path(name)
        return
    check_folder_exists(name)
    from huggingface_hub import snapshot_download

    identifier = SMOLLM2_HUB if name == SMOLLM2 else name
    try:
        fetched = Path(snapshot_download(identifier, allow_patterns=list(WANTED), **hub_options()))
    except Exception as error:
        raise CheckpointError(not_found(name, identifier, error)) from error
    # Outside the `try`: what goes wrong in the caller's block is not a failed download.
    check_not_adapter(name, fetched)
    yield fetched


def refuse_overlap(out: Path, inputs: Sequence[Path]) -> None:
    """Refuse an `out` where writing to it would change or remove one of the `inputs`, files or folders; `force` does not help.

    Folders are compared by identity, so links, relative paths and the case of letters make no difference.
    """
    for given in inputs:
        if _same(out, given):
            raise OutputError(f"`out` is {given} itself, and an original is never overwritten: choose another folder.")
        if any(_same(parent, given) for parent in out.parents):
            raise OutputError(f"`out` is inside {given}, and an original is never changed: choose a folder outside it.")
        for file in (given, *(given.iterdir() if given.is_dir() else ())):
            # The files of a folder may be links to another one, as in the cache of the hub.
            if any(_same(parent, out) for parent in file.resolve().parents):
                raise OutputError(
                    f"`out` contains {file}, and an original is never overwritten: choose a folder that does not contain it."
                )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


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


# What centering changed, measured on the original and on the copy as it loads from disk


def measure_model(config: AuditConfig, checkpoint: Checkpoint, blocks: Blocks, progress: Progress) -> CenteringNumbers:
    """The numbers of one model in fp32, over all rows of the head; μ also over the `valid_vocab` of the configuration."""
    report = run_audit(replace(config, valid_vocab=None), checkpoint=checkpoint, progress=progress)
    valid = None
    if config.valid_vocab not in (None, report.model.vocab):
        valid = run_audit(config, checkpoint=checkpoint, progress=progress).mu_abs_99
    raw, spacing = report.heads.raw, report.precision.raw
    (bf16_ce, bf16_rms), (fp16_ce, fp16_rms) = (
        storage_error(checkpoint, blocks, dtype) for dtype in (torch.bfloat16, torch.float16)
    )
    return CenteringNumbers(
        ppl=report.ppl,
        mu_abs_99=report.mu_abs_99,
        p_z_999=raw.p_z_999,
        a_p_99=raw.a_p_99,
        row_max_999=raw.row_max_999,
        bf16_spacing=spacing.bf16_spacing,
        fp16_spacing=spacing.fp16_spacing,
        bf16_ce_error=bf16_ce,
        bf16_logit_rms=bf16_rms,
        fp16_ce_error=fp16_ce,
        fp16_logit_rms=fp16_rms,
        mu_valid_abs_99=valid,
    )


@torch.no_grad()
def storage_error(checkpoint: Checkpoint, blocks: Blocks, dtype: torch.dtype) -> tuple[float, float]:
    """What logits stored in `dtype` lose, over the first block.

    (mean over tokens of |CE(rounded logits) − CE(logits)|, root mean square of rounded − exact over all logits)
    """
    head = find_head(checkpoint)
    with hidden_states(checkpoint, head) as hidden_of:
        hidden_TD = blocks.counted(hidden_of(blocks.inputs(0, 1)))[0]
    target_T = blocks.targets(0, 1).reshape(-1)
    ce_gap, squares, logits = 0.0, 0.0, 0
    for start in range(0, len(target_T), CHUNK):
        z_CV = head.logits(hidden_TD[start : start + CHUNK])
        stored_CV = z_CV.to(dtype).float()
        part_C = target_T[start : start + CHUNK]
        exact, rounded = (F.cross_entropy(z, part_C, reduction="none") for z in (z_CV, stored_CV))
        ce_gap += float((rounded - exact).abs().double().sum())
        squares += float((stored_CV - z_CV).double().square().sum())
        logits += z_CV.numel()
    return ce_gap / len(target_T), (squares / logits) ** 0.5


@torch.no_grad()
def greedy_continuation(checkpoint: Checkpoint, blocks: Blocks) -> Tensor:
    """64 tokens after the first 16 of the text, each the most likely one."""
    prompt = blocks.inputs(0, 1)[:, :PROMPT_TOKENS]
    model = checkpoint.model
    out: Tensor = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS,
        do_sample=False, num_beams=1, pad_token_id=0, repetition_penalty=1.0,
    )  # fmt: skip
    return out[0, prompt.shape[1] :]
