"""One centering: load, plan, write, load again, compare, and only then put the copy in its place."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.checkpoint.run import run_audit
from zloss.audit.config import AuditConfig
from zloss.console import Progress, Silent
from zloss.errors import CheckpointError, OutputError
from zloss.measure.logit_noise import STORAGE
from zloss.measure.measurement import model_blocks, resolve_vocab
from zloss.models.checkpoint import (
    SMOLLM2_HUB,
    Checkpoint,
    check_folder_exists,
    check_not_adapter,
    gguf_file,
    hub_options,
    load_checkpoint,
    not_found,
)
from zloss.models.gguf import converted_gguf
from zloss.models.output_head import find_head, hidden_states
from zloss.protocol.center_files import (
    PPL_AGREEMENT,
    WeightFiles,
    findings_of,
    plan_change,
    refuse_uncenterable,
    write_card,
    write_model,
)
from zloss.protocol.config import CenterConfig
from zloss.results.centering import Centering, CenteringNumbers, CopyVerdict
from zloss.results.folder import LOCK_FILE, check_folder, locked_folder, whole_folder
from zloss.results.io import remove_abandoned
from zloss.results.options import SMOLLM2
from zloss.results.provenance import Provenance, shared_keys, without_folders
from zloss.text import Blocks, open_corpus

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*")
"""Files of a hub snapshot that a copy needs."""
CHUNK = 128
"""Tokens whose logits are held at once."""
GREEDY_TOKENS = 64
PROMPT_TOKENS = 16
AS_YOU_LIKE = "Keep the original or the copy, as you like"
"""How the sentence of a neutral copy begins."""
PPL_RISE, PPL_RISE_16_BIT = 1e-5, 1e-3
"""Largest relative rise of PPL that rounding explains, for a head stored in 32 or 64 bits and in 16 bits: rounding the centered
head of SmolLM2 to bf16 moves log-probabilities by 0.015 nat (RMS), their mean over some thousand tokens by a few 1e-4."""


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
    check_folder(out)
    check_folder(out.parent)
    # Here too: a run that was killed after its copy was in place makes the next run fail.
    remove_abandoned(out.parent)
    _refuse_filled(out, force)
    here = Path.cwd()
    if os.path.ismount(out) or out in (here, *here.parents):
        raise OutputError(
            f"{out} is a mount point, or the folder that this command runs in: a finished copy is renamed to its place, so "
            "choose a folder inside it."
        )
    with source_folder(config.model) as source:
        refuse_overlap(out, [source])
        with locked_folder(out):
            # Again: another process may have filled it before this one got the lock.
            _refuse_filled(out, force)
            return _center(config, source, out, progress or Silent(), command)


def _center(config: CenterConfig, source: Path, out: Path, progress: Progress, command: str) -> Centering:
    started, begin = datetime.now(UTC), time.perf_counter()
    with progress.step(f"loading {config.model}", None):
        before = load_checkpoint(str(source), allow_pickle=None, takes_tokenizer=False)
    head = find_head(before)
    refuse_uncenterable(before, head)
    valid_vocab = resolve_vocab(config.valid_vocab, head.vocab, len(before.tokenizer))
    files = WeightFiles(source)
    refuse_overlap(out, [source / name for name in files.keys_of])
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
    numbers_before, reference_T = measure_model(audit, before, blocks, progress)
    greedy_before = greedy_continuation(before, blocks)
    with whole_folder(out) as part:
        with progress.step(f"writing {out.name}", None):
            write_model(files, change, part)
        after = load_checkpoint(str(part))
        numbers_after, _ = measure_model(replace(audit, model=str(part)), after, blocks, progress, reference_T)
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
            logits=config.logits,
            provenance=Provenance(**shared_keys(command, started, time.perf_counter() - begin)),
        )
        verdict = judge_copy(result, shift_noise=config.shift_noise, shift_bits=config.shift_bits)
        result = replace(result, verdict=verdict, findings=findings_of(result))
        result.write(part)
        write_card(files.folder, part, result)
    return result


# Where it may read and write


@contextlib.contextmanager
def source_folder(name: str) -> Iterator[Path]:
    """A folder in the Hugging Face format with safetensors weights: a local one, a converted GGUF file, or a hub snapshot."""
    gguf = gguf_file(name)
    if gguf is not None:
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
    """Reject an `out` where writing to it would change or remove one of the `inputs`, files or folders; `force` does not help.

    Folders are compared by identity, so links, relative paths and the case of letters make no difference.
    """
    for given in inputs:
        if _same(out, given):
            raise OutputError(f"`out` is {given} itself, which is never overwritten: choose another folder.")
        if any(_same(parent, given) for parent in out.parents):
            raise OutputError(f"`out` is inside {given}, which is never changed: choose a folder outside it.")
        for file in (given, *(given.iterdir() if given.is_dir() else ())):
            # Files may be symlinks into another folder, as in the Hub cache.
            if any(_same(parent, out) for parent in Path(os.path.realpath(file)).parents):
                raise OutputError(
                    f"`out` contains {file}, which is never overwritten: choose a folder that does not contain it."
                )


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _refuse_filled(out: Path, force: bool) -> None:
    # A killed run leaves its lock file.
    if not force and out.is_dir() and any(path.name != LOCK_FILE for path in out.iterdir()):
        raise OutputError(f"{out} is not empty: choose another folder, or pass `force` to replace what it holds.")


# What centering changed, measured on the original and on the copy as it loads from disk


def measure_model(
    config: AuditConfig, checkpoint: Checkpoint, blocks: Blocks, progress: Progress, reference_T: Tensor | None = None
) -> tuple[CenteringNumbers, Tensor]:
    """(the numbers of one model, its log p(y) [T] from fp32 logits), over all rows of the head.

    μ is measured over the `valid_vocab` of the configuration too. The noise of 16-bit logits is measured against
    `reference_T`, log p(y) of the original; None for the original itself.
    """
    report = run_audit(replace(config, valid_vocab=None), checkpoint=checkpoint, progress=progress, noise=False)
    valid = None
    if config.valid_vocab not in (None, report.model.vocab):
        valid = run_audit(config, checkpoint=checkpoint, progress=progress, noise=False).mu_abs_99
    raw, spacing = report.heads.raw, report.precision.raw
    log_p, logit_rms = stored_log_probs(checkpoint, blocks)
    exact_T = log_p["fp32"]
    numbers = CenteringNumbers(
        ppl=report.ppl,
        mu_abs_99=report.mu_abs_99,
        p_z_999=raw.p_z_999,
        a_p_99=raw.a_p_99,
        row_max_999=raw.row_max_999,
        bf16_spacing=spacing.bf16_spacing,
        fp16_spacing=spacing.fp16_spacing,
        mu_valid_abs_99=valid,
        **{f"{name}_ce_error": float((log_p[name] - exact_T).abs().mean()) for name in STORAGE},
        **{f"{name}_logit_rms": logit_rms[name] for name in STORAGE},
        **{f"{name}_noise": _rms(log_p[name] - (exact_T if reference_T is None else reference_T)) for name in STORAGE},
    )
    return numbers, exact_T


@torch.no_grad()
def stored_log_probs(checkpoint: Checkpoint, blocks: Blocks) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(log p(y) [T] in fp64 by how the logits are stored, root mean square of stored − fp32 over all logits)."""
    head = find_head(checkpoint)
    log_p = {name: list[Tensor]() for name in ("fp32", *STORAGE)}
    squares: dict[str, float] = dict.fromkeys(STORAGE, 0.0)
    logits = 0
    with hidden_states(checkpoint, head) as hidden_of:
        for block in range(blocks.count):
            hidden_TD = blocks.counted(hidden_of(blocks.inputs(block, block + 1)))[0]
            target_T = blocks.targets(block, block + 1).reshape(-1)
            for start in range(0, len(target_T), CHUNK):
                z_CV, target_C = head.logits(hidden_TD[start : start + CHUNK]), target_T[start : start + CHUNK]
                logits += z_CV.numel()
                log_p["fp32"].append(-F.cross_entropy(z_CV, target_C, reduction="none").double())
                for name, dtype in STORAGE.items():
                    stored_CV = z_CV.to(dtype).float()
                    log_p[name].append(-F.cross_entropy(stored_CV, target_C, reduction="none").double())
                    squares[name] += float((stored_CV - z_CV).double().square().sum())
    rms = {name: math.sqrt(total / logits) for name, total in squares.items()}
    return {name: torch.cat(parts) for name, parts in log_p.items()}, rms


def _rms(gap_T: Tensor) -> float | None:
    """Root mean square; None if it is not finite."""
    value = float(gap_T.square().mean().sqrt())
    return value if math.isfinite(value) else None


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


# Verdict


def judge_copy(result: Centering, *, shift_noise: float, shift_bits: float) -> CopyVerdict:
    """What to do with the copy; the first row that applies.

    S is the noise of the logits in the precision of the user's stack, before and after; fp32 logits have none.

    | action | when |
    |---|---|
    | discard | PPL rises by more than rounding to the stored dtype explains: 1e-5 for 32 bits, 1e-3 for 16 bits (relative) |
    | discard | a head of 32 bits or more: PPL rises by more than 1e-6, and the greedy continuation differs |
    | discard | S rises by `shift_bits` bits or more, to `shift_noise` or more; or logits overflow that did not before |
    | keep | S was at least `shift_noise` and falls by `shift_bits` bits or more; or logits overflowed and no longer do |
    | neutral | anything else |
    """
    where = f"measured on {result.predictions:,} tokens of {result.corpus}"
    assert result.before.ppl is not None
    assert result.after.ppl is not None
    rise, rounded = result.after.ppl / result.before.ppl - 1, "float16" in result.stored_dtype
    said = f"Discard the copy: its perplexity rises from {result.before.ppl:.4g} by {100 * rise:.2g} %"
    if rise > (PPL_RISE_16_BIT if rounded else PPL_RISE):
        said += f", more than rounding to {result.stored_dtype} explains"
        return CopyVerdict("discard", f"{said}, {where}.")
    if not rounded and not result.greedy_equal and rise > PPL_AGREEMENT:
        return CopyVerdict("discard", f"{said}, and its greedy continuation differs, {where}.")
    if result.logits == "fp32":
        said = f"{AS_YOU_LIKE}: fp32 logits lose nothing to a common shift, so the copy is neither better nor worse"
        return CopyVerdict("neutral", f"{said}, {where}.")
    # Logits that overflow have an infinite error.
    before, after = (
        math.inf if side is None else side
        for side in (getattr(result.before, f"{result.logits}_noise"), getattr(result.after, f"{result.logits}_noise"))
    )
    words = [f"{one:.3f} nat" if math.isfinite(one) else f"{result.logits} logits overflow" for one in (before, after)]
    error = f"the error of a token's log-probability from {result.logits} logits (RMS)"
    changed = f"{error} goes from {words[0]} to {words[1]}"
    bits = (
        0.0
        if before == after
        else math.inf
        if after == 0
        else -math.inf
        if before == 0 or math.isinf(after)
        else math.log2(before / after)
    )
    if bits <= -shift_bits and after >= shift_noise:
        return CopyVerdict("discard", f"Discard the copy: {changed}, {where}.")
    if bits >= shift_bits and before >= shift_noise:
        return CopyVerdict("keep", f"Keep the copy: {changed}, {where}.")
    moved = f"centering moves {error} from {words[0]} to {words[1]}"
    if max(before, after) < shift_noise:
        moved += f", and below {shift_noise:g} nat neither matters"
    elif math.isinf(before):
        moved = f"{result.logits} logits overflow in both"
    else:
        moved += (
            f", a {'gain' if bits >= 0 else 'loss'} of {abs(bits):.1f} bit, where {shift_bits:g} or more would matter"
        )
    return CopyVerdict("neutral", f"{AS_YOU_LIKE}: {moved}, {where}.")
