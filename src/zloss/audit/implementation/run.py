"""One implementation audit: load, check, then source, implementations, updates and fp16 margin one after the other.

Ctrl-C ends the section that runs; the sections before it are in the record, which is then partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from zloss.audit.checkpoint.clock import Clock
from zloss.audit.implementation.applied_losses import applied_losses, chosen_implementations
from zloss.audit.implementation.audited_head import AuditedHead, head_inputs
from zloss.audit.implementation.config import ImplementationAuditConfig
from zloss.audit.implementation.sections import fp16_rooms, named_objectives, stored_logits, update_errors
from zloss.console.progress import Progress, Silent
from zloss.errors import InputError
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.head_check import check_head
from zloss.models.output_head import find_head
from zloss.results.audit import CorpusInfo, ModelInfo
from zloss.results.folder_owner import PLACE_KEY, place_of
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.named_path import without_folders
from zloss.results.provenance import AuditProvenance, shared_keys
from zloss.text.corpus import Corpus, open_corpus

INTERRUPTED = "the audit was interrupted before it was complete"
Sections = dict[str, tuple[Callable[[], Any], str]]
"""Name of a section → what measures it, and why it is left out; empty where it is not."""


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

    device, objectives = _device(config.device), named_objectives(config)
    implementations = chosen_implementations(config, note)
    with clock("load"), progress.step(f"loading {config.model[-40:]}", None):
        if checkpoint is None:
            checkpoint = load_checkpoint(
                config.model, trust_remote_code=config.trust_remote_code, allow_pickle=config.allow_pickle
            )
        checkpoint.model.to(device)
    with clock("text"), progress.step("reading text", None):
        corpus = open_corpus(config.texts, config.corpus, config.text_field)
        model = _audited_head(config, checkpoint, corpus, device, note)
    with clock("check"), progress.step("checking the head", None):
        check_head(checkpoint, model.head, model.blocks.inputs(0, 1)[0])

    hidden_TD = torch.empty(0)

    def source() -> Any:
        nonlocal hidden_TD
        hidden_TD = head_inputs(model, progress)
        return stored_logits(config, model, hidden_TD, progress)

    sections: Sections = {
        "source": (source, ""),
        "implementations": (
            lambda: applied_losses(config, model, implementations, hidden_TD, progress, note),
            "" if implementations else "no implementation was asked for",
        ),
        "updates": (
            lambda: update_errors(config, model, progress),
            "" if config.update_blocks else "left out (update_blocks = 0)",
        ),
        "overflow": (
            lambda: fp16_rooms(config, model, objectives, progress, note),
            "" if config.overflow_blocks else "left out (overflow_blocks = 0)",
        ),
    }
    found, reasons = _measured(sections, clock)
    return ImplementationAudit(
        model=_model_info(config, model),
        corpus=CorpusInfo(
            name=corpus.name,
            blocks=model.blocks.count,
            block_size=model.blocks.size,
            predictions=model.blocks.predictions,
            bos=model.blocks.bos_id is not None,
            extra=dict(corpus.provenance),
        ),
        coef=config.coef,
        target=model.target,
        **found,
        provenance=AuditProvenance(
            **shared_keys(command, started, clock.total),
            seed=0,
            extra={"threads": torch.get_num_threads(), "device": device.type},
        ),
        autocast=None if config.autocast == "fp32" else config.autocast,
        status="partial" if INTERRUPTED in reasons.values() else "complete",
        timings=clock.seconds,
        reasons=reasons,
        notes=tuple(notes),
    )


def _measured(sections: Sections, clock: Clock) -> tuple[dict[str, Any], dict[str, str]]:
    """(lines of every section, why a section is empty); after Ctrl-C the sections behind it are empty."""
    found: dict[str, Any] = dict.fromkeys(sections, ())
    reasons: dict[str, str] = {}
    interrupted = False
    for name, (measure, left_out) in sections.items():
        if interrupted or left_out:
            reasons[name] = INTERRUPTED if interrupted else left_out
            continue
        try:
            with clock(name):
                found[name] = measure()
        except KeyboardInterrupt:
            interrupted, reasons[name] = True, INTERRUPTED
    return found, reasons


def _device(name: str) -> torch.device:
    """The device, or one sentence that says why the audit cannot run there."""
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


def _audited_head(
    config: ImplementationAuditConfig,
    checkpoint: Checkpoint,
    corpus: Corpus,
    device: torch.device,
    note: Callable[[str], None],
) -> AuditedHead:
    head = find_head(checkpoint)
    cut = model_blocks(checkpoint, corpus, size=config.block_size, count=config.blocks, bos=config.bos)
    for sentence in cut.notes:
        note(sentence)
    blocks = cut.blocks
    moved = type(blocks)(blocks.stream.to(device), blocks.size, blocks.count, blocks.bos_id, blocks.offset)
    return AuditedHead(checkpoint, head, moved, math.log(head.vocab))


def _model_info(config: ImplementationAuditConfig, model: AuditedHead) -> ModelInfo:
    head = model.head
    return ModelInfo(
        name=without_folders(config.model),
        vocab=head.vocab,
        width=head.width,
        tied=head.tied,
        bias=head.bias_V is not None,
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        extra={
            "source": model.checkpoint.source,
            "class": type(model.checkpoint.model).__name__,
            PLACE_KEY: place_of(config.model),
            "parameters": sum(parameter.numel() for parameter in model.checkpoint.model.parameters()),
        },
    )
