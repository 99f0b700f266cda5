"""One implementation audit: load, check, then the sections one after the other: source, implementations, updates, fp16 margin.

Ctrl-C ends the section that is running; finished sections stay in the record, which is then marked partial.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from zloss.audit.implementation.config import NO_IMPLEMENTATION, ImplementationAuditConfig, Storage
from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation, interpreted
from zloss.audit.implementation.kernels import kernel_line, linear_line
from zloss.audit.implementation.overflow import OverflowLine, overflow_audit
from zloss.audit.implementation.source import ReferenceHead, source_audit
from zloss.audit.implementation.update import update_audit
from zloss.console import Clock, Progress, Silent
from zloss.errors import InputError, ZlossError
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.head_check import check_head
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead, find_head
from zloss.results.audit import CorpusInfo, ModelInfo
from zloss.results.folder_owner import PLACE_KEY, place_of
from zloss.results.implementation_audit import AppliedLoss, Fp16Room, ImplementationAudit, StoredLogits, UpdateErrors
from zloss.results.named_path import without_folders
from zloss.results.provenance import AuditProvenance, shared_keys
from zloss.source.objective import Objective
from zloss.source.objectives.registry import make_objective
from zloss.text import Blocks, Corpus, open_corpus

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


Note = Callable[[str], None]


def stored_logits(
    config: ImplementationAuditConfig, model: AuditedHead, hidden_TD: Tensor, progress: Progress
) -> tuple[StoredLogits, ...]:
    """The source audit."""
    with progress.step("stored logits", len(hidden_TD)) as step:
        lines = source_audit(
            ReferenceHead.of(model.head),
            hidden_TD,
            block_size=model.blocks.size,
            storages=config.storages,
            logit_scales=config.logit_scales,
            coef=config.coef,
            target=model.target,
            advance=step.advance,
        )
    return tuple(
        StoredLogits(
            storage=line.storage,
            logit_scale=line.logit_scale,
            tokens=line.tokens,
            forward_rel_error=line.forward_scalar,
            delta_src=line.delta_src.mean,
            delta_src_p99=line.delta_src.p99,
            delta_src_max=line.delta_src.maximum,
            backward_cosine=line.cosine,
            nonfinite=line.delta_src.nonfinite,
        )
        for line in lines
    )


def update_errors(
    config: ImplementationAuditConfig, model: AuditedHead, progress: Progress
) -> tuple[UpdateErrors, ...]:
    """The update audit on the first blocks."""
    blocks = model.first(config.update_blocks)
    with progress.step("updates", blocks.predictions * len(config.logit_scales)) as step:
        lines = update_audit(
            model.checkpoint,
            model.head,
            blocks,
            storages=config.storages,
            logit_scales=config.logit_scales,
            coef=config.coef,
            target=model.target,
            advance=step.advance,
        )
    return tuple(
        UpdateErrors(
            storage=line.storage,
            logit_scale=line.logit_scale,
            part=line.part,
            scope=line.scope,
            tokens=line.tokens,
            grad_rel_error=line.grad_rel_error,
            grad_cosine=line.grad_cosine,
            adam_dir_rel_error=line.adam_rel_error,
            adam_dir_cosine=line.adam_cosine,
        )
        for line in lines
    )


def fp16_rooms(
    config: ImplementationAuditConfig,
    model: AuditedHead,
    objectives: dict[str, Objective],
    progress: Progress,
    note: Note,
) -> tuple[Fp16Room, ...]:
    """The overflow audit on the first blocks."""
    blocks = model.first(config.overflow_blocks)
    with progress.step("fp16 margin", blocks.predictions) as step:
        lines = overflow_audit(
            model.checkpoint,
            model.head,
            blocks,
            objectives,
            autocast=torch.bfloat16 if config.autocast == "bf16" else None,
            advance=step.advance,
            note=note,
        )
    return tuple(_room(line, config.coef if objectives[line.method].active else 0.0) for line in lines)


def _room(line: OverflowLine, coef: float) -> Fp16Room:
    margin = line.margin
    return Fp16Room(
        method=line.method,
        coef=coef,
        batches=line.batches,
        grad_norm_mean=line.grad_norm_mean,
        grad_inf_mean=line.grad_inf_mean,
        kappa_min=None if margin is None else margin.kappa_min,
        psi={} if margin is None else {f"psi_{scale}": share for scale, share in margin.psi.items()},
        nonfinite=0 if margin is None else margin.nonfinite,
        reason=line.reason,
    )


def named_objectives(config: ImplementationAuditConfig) -> dict[str, Objective]:
    """The methods of the overflow audit by name; an unknown one is refused."""
    return {name: make_objective(name, config.coef) for name in config.methods}


LEFT_OUT = ("cut-cross-entropy",)
"""Implementations that run only where they are named: a compiler works for minutes before the first number."""


def chosen_implementations(
    config: ImplementationAuditConfig, note: Callable[[str], None]
) -> tuple[Implementation, ...]:
    """Those that are named, else the installed ones; `note` is told which are left out."""
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


def applied_losses(
    config: ImplementationAuditConfig,
    model: AuditedHead,
    implementations: tuple[Implementation, ...],
    hidden_TD: Tensor,
    progress: Progress,
    note: Callable[[str], None],
) -> tuple[AppliedLoss, ...]:
    """Every implementation in every dtype, on a few evenly spread tokens of each block."""
    size = model.blocks.size
    inside = torch.linspace(0, size - 1, min(config.implementation_tokens, size)).long()
    chosen_T = (torch.arange(0, len(hidden_TD), size).unsqueeze(1) + inside).flatten().to(hidden_TD.device)
    label_T = model.blocks.targets(0, model.blocks.count).flatten()[chosen_T]
    lines, reference = list[AppliedLoss](), ReferenceHead.of(model.head)
    with progress.step("implementations", len(implementations) * len(config.storages), "lines") as step:
        for implementation in implementations:
            for storage in config.storages:
                try:
                    tokens = (hidden_TD[chosen_T], label_T)
                    lines.append(_applied(config, model, reference, implementation, storage, tokens, note))
                except ZlossError as error:
                    note(f"{implementation.title}, {storage}: {error}")
                step.advance(1)
    return tuple(lines)


def _applied(
    config: ImplementationAuditConfig,
    model: AuditedHead,
    reference: ReferenceHead,
    implementation: Implementation,
    storage: Storage,
    tokens: tuple[Tensor, Tensor],
    note: Callable[[str], None],
) -> AppliedLoss:
    """One line; `tokens` are hidden states [T, D] and labels [T]."""
    ran, (hidden_TD, label_T) = interpreted(implementation), tokens
    if implementation.takes == "logits":
        line = kernel_line(
            implementation,
            reference,
            hidden_TD,
            label_T,
            storage=storage,
            logit_scale=1,
            coef=config.coef,
            target=model.target,
        )
        errors = (line.forward, line.delta_total, line.total_cosine, line.delta_z, line.z_cosine, line.kernel_delta_z)
        return AppliedLoss(
            implementation.name, implementation.title, "logits", storage, line.tokens, ran, line.target, *errors, None
        )
    projected = linear_line(
        implementation,
        model.head,
        hidden_TD,
        label_T,
        inputs=storage,
        logit_scale=1,
        coef=config.coef,
        target=model.target,
        note=note,
    )
    return AppliedLoss(
        implementation=implementation.name,
        title=implementation.title,
        takes="linear",
        storage=storage,
        tokens=projected.tokens,
        interpreted=ran,
        target=projected.target,
        rel_forward_error=projected.forward,
        delta_total=projected.hidden_total,
        total_cosine=projected.total_cosine,
        delta_z=projected.hidden_z,
        z_cosine=projected.z_cosine,
        kernel_delta_z=projected.hidden_z,
        delta_weight=projected.weight_total,
    )


@dataclass(frozen=True)
class AuditedHead:
    """A model, its head and its text, on one device."""

    checkpoint: Checkpoint
    head: OutputHead
    blocks: Blocks
    target: float
    """c = log V of the head."""

    def first(self, count: int) -> Blocks:
        """The first `count` blocks of the text."""
        count = min(count, self.blocks.count)
        return replace(self.blocks, stream=self.blocks.stream[: count * self.blocks.size + 1], count=count)


@torch.no_grad()
def head_inputs(model: AuditedHead, progress: Progress) -> Tensor:
    """Hidden states [T, D] of every prediction, one block after the other."""
    parts = []
    with (
        hidden_states(model.checkpoint, model.head) as hidden_of,
        progress.step("hidden states", model.blocks.predictions) as step,
    ):
        for block in range(model.blocks.count):
            parts.append(model.blocks.counted(hidden_of(model.blocks.inputs(block, block + 1))).flatten(0, 1))
            step.advance(model.blocks.size)
    return torch.cat(parts)
