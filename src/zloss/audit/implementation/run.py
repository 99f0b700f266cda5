"""One implementation audit: load, check, then one section after another: source, log-probabilities,
implementations, updates, fp16 headroom.

Ctrl-C ends the section that is running; finished sections stay in the record, which is then marked partial.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, product
from typing import Any, Literal

import torch
from torch import Tensor

from zloss.audit.checkpoint.report import corpus_info, model_info
from zloss.audit.config import NO_IMPLEMENTATION, ImplementationAuditConfig
from zloss.audit.implementation.gradients import overflow_audit, update_audit
from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation, interpreted
from zloss.audit.implementation.kernels import kernel_line
from zloss.audit.implementation.source import source_audit
from zloss.console import Clock, Progress, Silent
from zloss.errors import InputError, ZlossError
from zloss.measure.logit_noise import NOISE_BLOCKS, logit_noise
from zloss.measure.measurement import lacks_centered, model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import OutputHead, check_head, find_head, hidden_states
from zloss.objectives import make_objective
from zloss.results.implementation_audit import (
    AppliedLoss,
    Fp16Headroom,
    ImplementationAudit,
    StoredLogits,
    UpdateErrors,
)
from zloss.results.logprobs import LogprobNoise
from zloss.results.provenance import AuditProvenance, shared_keys
from zloss.text import Blocks, open_corpus

INTERRUPTED = "the audit was interrupted before it was complete"
LEFT_OUT = ("cut-cross-entropy",)
"""Implementations that run only if they are named: their compiler takes minutes."""


def run_implementation_audit(
    config: ImplementationAuditConfig,
    *,
    progress: Progress | None = None,
    command: str = "zloss.audit.implementation.run.run_implementation_audit",
    checkpoint: Checkpoint | None = None,
) -> ImplementationAudit:
    """The record of one audit; `checkpoint` is a model that is already loaded, in fp32."""
    progress = progress or Silent()
    clock, started = Clock(), datetime.now(UTC)
    notes: dict[str, None] = {}

    def note(sentence: str) -> None:
        notes.setdefault(sentence.rstrip("."))

    device = _device(config.device)
    objectives = {name: make_objective(name, config.coef) for name in config.methods}
    implementations = chosen_implementations(config, note)
    with clock("load"), progress.step(f"loading {config.model[-40:]}", None):
        if checkpoint is None:
            checkpoint = load_checkpoint(
                config.model,
                trust_remote_code=config.trust_remote_code,
                allow_pickle=config.allow_pickle,
                tokenizer=config.tokenizer,
            )
        checkpoint.model.to(device)
    with clock("text"), progress.step("reading text", None):
        corpus = open_corpus(config.texts, config.corpus, config.text_field)
        head = find_head(checkpoint)
        cut = model_blocks(checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos)
        for sentence in cut.notes:
            note(sentence)
        blocks = replace(cut.blocks, stream=cut.blocks.stream.to(device))
    with clock("check"), progress.step("checking the head", None):
        check_head(checkpoint, head, blocks.inputs(0, 1)[0])

    target = math.log(head.vocab)
    scaled: dict[str, Any] = {
        "storages": config.storages,
        "logit_scales": config.logit_scales,
        "coef": config.coef,
        "target": target,
    }
    hidden_TD = torch.empty(0)

    def source() -> tuple[StoredLogits, ...]:
        nonlocal hidden_TD
        hidden_TD = _head_inputs(checkpoint, head, blocks, progress)
        with progress.step("stored logits", len(hidden_TD)) as step:
            lines = source_audit(head, hidden_TD, block_size=blocks.size, **scaled, advance=step.advance)
        return tuple(line.result() for line in lines)

    def logprobs() -> tuple[LogprobNoise, ...]:
        count = min(NOISE_BLOCKS, blocks.count)
        parts = zip(torch.split(hidden_TD, blocks.size), blocks.targets(0, blocks.count), strict=True)
        weight_VD = head.weight_VD.detach()
        with progress.step("log-probabilities", None):
            return logit_noise(
                head,
                islice(parts, count),
                vocab=head.vocab,
                mean_row_D=None if lacks_centered(head, head.vocab) else weight_VD.mean(dim=0, dtype=torch.float64),
                saved_dtype=checkpoint.stored_dtype or weight_VD.dtype,
            ).rows

    def applied() -> tuple[AppliedLoss, ...]:
        return _applied_losses(config, implementations, head, hidden_TD, blocks, target, progress, note)

    def updates() -> tuple[UpdateErrors, ...]:
        first = blocks.first(config.update_blocks)
        with progress.step("updates", first.predictions * len(config.logit_scales)) as step:
            return update_audit(checkpoint, head, first, **scaled, advance=step.advance)

    def overflow() -> tuple[Fp16Headroom, ...]:
        first = blocks.first(config.overflow_blocks)
        autocast = torch.bfloat16 if config.autocast == "bf16" else None
        with progress.step("fp16 margin", first.predictions) as step:
            return overflow_audit(
                checkpoint,
                head,
                first,
                objectives,
                coef=config.coef,
                autocast=autocast,
                advance=step.advance,
                note=note,
            )

    sections: dict[str, tuple[Callable[[], Any], str]] = {
        "source": (source, ""),
        "logprobs": (logprobs, ""),
        "implementations": (applied, "" if implementations else "no implementation was requested"),
        "updates": (updates, "" if config.update_blocks else "skipped (update_blocks = 0)"),
        "overflow": (overflow, "" if config.overflow_blocks else "skipped (overflow_blocks = 0)"),
    }
    found: dict[str, Any] = dict.fromkeys(sections, ())
    reasons = {name: left_out for name, (_, left_out) in sections.items() if left_out}
    status: Literal["complete", "partial"] = "complete"
    for name, (measure, left_out) in sections.items():
        try:
            if status == "complete" and not left_out:
                with clock(name):
                    found[name] = measure()
        except KeyboardInterrupt:
            status = "partial"
        if status == "partial":
            reasons[name] = INTERRUPTED

    return ImplementationAudit(
        model=model_info(config.model, checkpoint, head),
        corpus=corpus_info(corpus, blocks),
        coef=config.coef,
        target=target,
        **found,
        provenance=AuditProvenance(
            **shared_keys(command, started, clock.total),
            seed=0,
            extra={"threads": torch.get_num_threads(), "device": device.type},
        ),
        autocast=None if config.autocast == "fp32" else config.autocast,
        status=status,
        timings=clock.seconds,
        reasons=reasons,
        notes=tuple(notes),
    )


def _device(name: str) -> torch.device:
    """The device, or one sentence on why the audit cannot run there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(
            f"`device` is expected to be cpu, cuda or cuda:N, because the reference is fp64, but got {name!r}."
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"`device` is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices.")
    return device


def chosen_implementations(
    config: ImplementationAuditConfig, note: Callable[[str], None]
) -> tuple[Implementation, ...]:
    """The named implementations, or all installed ones; `note` receives a sentence on each that is left out."""
    if config.implementations == (NO_IMPLEMENTATION,):
        return ()
    if config.implementations:
        named = tuple(find_implementation(name) for name in config.implementations)
        for implementation in named:
            implementation.require()
        return named
    chosen = []
    for implementation in IMPLEMENTATIONS.values():
        if not implementation.installed:
            note(f"{implementation.title}: not installed")
        elif implementation.name in LEFT_OUT:
            note(f"{implementation.title}: skipped, because it takes minutes to compile; name it in `implementations`")
        else:
            chosen.append(implementation)
    return tuple(chosen)


@torch.no_grad()
def _head_inputs(checkpoint: Checkpoint, head: OutputHead, blocks: Blocks, progress: Progress) -> Tensor:
    """Hidden states [T, D] of every prediction, block by block."""
    parts = []
    with hidden_states(checkpoint, head) as hidden_of, progress.step("hidden states", blocks.predictions) as step:
        for block in range(blocks.count):
            parts.append(blocks.counted(hidden_of(blocks.inputs(block, block + 1))).flatten(0, 1))
            step.advance(blocks.size)
    return torch.cat(parts)


def _applied_losses(
    config: ImplementationAuditConfig,
    implementations: tuple[Implementation, ...],
    head: OutputHead,
    hidden_TD: Tensor,
    blocks: Blocks,
    target: float,
    progress: Progress,
    note: Callable[[str], None],
) -> tuple[AppliedLoss, ...]:
    """Every implementation in every dtype, on a few evenly spread tokens of each block."""
    inside = torch.linspace(0, blocks.size - 1, min(config.implementation_tokens, blocks.size)).long()
    chosen_T = (torch.arange(0, len(hidden_TD), blocks.size).unsqueeze(1) + inside).flatten().to(hidden_TD.device)
    hidden_TD, label_T = hidden_TD[chosen_T], blocks.targets(0, blocks.count).flatten()[chosen_T]
    losses: list[AppliedLoss] = []
    with progress.step("implementations", len(implementations) * len(config.storages), "lines") as step:
        for implementation, storage in product(implementations, config.storages):
            try:
                line = kernel_line(
                    implementation,
                    head,
                    hidden_TD,
                    label_T,
                    storage=storage,
                    logit_scale=1,
                    coef=config.coef,
                    target=target,
                    note=note,
                )
            except ZlossError as error:
                note(f"{implementation.title}, {storage}: {error}")
            else:
                losses.append(
                    AppliedLoss(
                        implementation=implementation.name,
                        title=implementation.title,
                        takes=implementation.takes,
                        storage=storage,
                        tokens=line.tokens,
                        interpreted=interpreted(implementation),
                        target=line.target,
                        rel_forward_error=line.forward,
                        delta_total=line.delta_total,
                        total_cosine=line.total_cosine,
                        delta_z=line.delta_z,
                        z_cosine=line.z_cosine,
                        kernel_delta_z=line.kernel_delta_z,
                        delta_weight=line.delta_weight,
                    )
                )
            step.advance(1)
    return tuple(losses)
