"""One implementation audit: load, check, then one section after another: source, implementations, updates, fp16 headroom.

Ctrl-C ends the section that is running; finished sections stay in the record, which is then marked partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from zloss.audit.implementation.config import NO_IMPLEMENTATION, ImplementationAuditConfig
from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation, interpreted
from zloss.audit.implementation.kernels import KernelLine, LinearLine, kernel_line, linear_line
from zloss.audit.implementation.overflow import overflow_audit
from zloss.audit.implementation.source import ReferenceHead, source_audit
from zloss.audit.implementation.update import update_audit
from zloss.console import Clock, Progress, Silent
from zloss.errors import InputError, ZlossError
from zloss.measure.measurement import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import OutputHead, check_head, find_head, hidden_states
from zloss.objectives import make_objective
from zloss.results.audit import CorpusInfo, ModelInfo
from zloss.results.folder import PLACE_KEY, place_of
from zloss.results.implementation_audit import (
    AppliedLoss,
    Fp16Headroom,
    ImplementationAudit,
    StoredLogits,
    UpdateErrors,
)
from zloss.results.provenance import AuditProvenance, shared_keys, without_folders
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
                config.model, trust_remote_code=config.trust_remote_code, allow_pickle=config.allow_pickle
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
    hidden_TD = torch.empty(0)
    scaled: dict[str, Any] = {
        "storages": config.storages,
        "logit_scales": config.logit_scales,
        "coef": config.coef,
        "target": target,
    }

    def source() -> tuple[StoredLogits, ...]:
        nonlocal hidden_TD
        hidden_TD = _head_inputs(checkpoint, head, blocks, progress)
        with progress.step("stored logits", len(hidden_TD)) as step:
            lines = source_audit(
                ReferenceHead.of(head), hidden_TD, block_size=blocks.size, **scaled, advance=step.advance
            )
        return tuple(line.result() for line in lines)

    def applied() -> tuple[AppliedLoss, ...]:
        return _applied_losses(config, implementations, head, hidden_TD, blocks, target, progress, note)

    def updates() -> tuple[UpdateErrors, ...]:
        first = blocks.first(config.update_blocks)
        with progress.step("updates", first.predictions * len(config.logit_scales)) as step:
            lines = update_audit(checkpoint, head, first, **scaled, advance=step.advance)
        return tuple(line.result() for line in lines)

    def overflow() -> tuple[Fp16Headroom, ...]:
        first = blocks.first(config.overflow_blocks)
        autocast = torch.bfloat16 if config.autocast == "bf16" else None
        with progress.step("fp16 margin", first.predictions) as step:
            lines = overflow_audit(
                checkpoint, head, first, objectives, autocast=autocast, advance=step.advance, note=note
            )
        return tuple(line.result(config.coef if objectives[line.method].active else 0.0) for line in lines)

    sections: dict[str, Callable[[], tuple[Any, ...]]] = {
        "source": source,
        "implementations": applied,
        "updates": updates,
        "overflow": overflow,
    }
    reasons = {}
    if not implementations:
        reasons["implementations"] = "no implementation was asked for"
    if not config.update_blocks:
        reasons["updates"] = "left out (update_blocks = 0)"
    if not config.overflow_blocks:
        reasons["overflow"] = "left out (overflow_blocks = 0)"
    found: dict[str, Any] = dict.fromkeys(sections, ())
    interrupted = False
    for name, measure in sections.items():
        if interrupted:
            reasons[name] = INTERRUPTED
        elif name not in reasons:
            try:
                with clock(name):
                    found[name] = measure()
            except KeyboardInterrupt:
                interrupted, reasons[name] = True, INTERRUPTED

    return ImplementationAudit(
        model=_model_info(config, checkpoint, head),
        corpus=CorpusInfo(
            name=corpus.name,
            blocks=blocks.count,
            block_size=blocks.size,
            predictions=blocks.predictions,
            bos=blocks.bos_id is not None,
            extra=dict(corpus.provenance),
        ),
        coef=config.coef,
        target=target,
        **found,
        provenance=AuditProvenance(
            **shared_keys(command, started, clock.total),
            seed=0,
            extra={"threads": torch.get_num_threads(), "device": device.type},
        ),
        autocast=None if config.autocast == "fp32" else config.autocast,
        status="partial" if interrupted else "complete",
        timings=clock.seconds,
        reasons=reasons,
        notes=tuple(notes),
    )


def _device(name: str) -> torch.device:
    """The device, or one sentence on why the audit cannot run there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"`device` is expected to be cpu, cuda or cuda:N, but got {name!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"`device` is expected to be cpu, cuda or cuda:N, because the reference is fp64, but got {name!r}."
        )
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
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
            note(f"{implementation.title}: left out, its compiler takes minutes; name it in `implementations`")
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
    reference = ReferenceHead.of(head)
    shared: dict[str, Any] = {"logit_scale": 1, "coef": config.coef, "target": target}
    losses: list[AppliedLoss] = []
    with progress.step("implementations", len(implementations) * len(config.storages), "lines") as step:
        for implementation in implementations:
            for storage in config.storages:
                line: KernelLine | LinearLine
                try:
                    if implementation.takes == "logits":
                        line = kernel_line(implementation, reference, hidden_TD, label_T, storage=storage, **shared)
                    else:
                        line = linear_line(
                            implementation, head, hidden_TD, label_T, inputs=storage, **shared, note=note
                        )
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
                except ZlossError as error:
                    note(f"{implementation.title}, {storage}: {error}")
                step.advance(1)
    return tuple(losses)


def _model_info(config: ImplementationAuditConfig, checkpoint: Checkpoint, head: OutputHead) -> ModelInfo:
    return ModelInfo(
        name=without_folders(config.model),
        vocab=head.vocab,
        width=head.width,
        tied=head.tied,
        bias=head.bias_V is not None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        extra={
            "source": checkpoint.source,
            "class": type(checkpoint.model).__name__,
            PLACE_KEY: place_of(config.model),
            "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        },
    )
