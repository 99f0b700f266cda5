"""The sections of an implementation audit: each runs one of the audits of this room and returns its lines as records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zloss.audit.implementation.config import NO_IMPLEMENTATION, ImplementationAuditConfig, Storage
from zloss.audit.implementation.evaluate import interpreted
from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation
from zloss.audit.implementation.kernels import kernel_line
from zloss.audit.implementation.linear_kernels import linear_line
from zloss.audit.implementation.overflow import OverflowLine, overflow_audit
from zloss.audit.implementation.source import source_audit
from zloss.audit.implementation.storage import ReferenceHead
from zloss.audit.implementation.update import update_audit
from zloss.console.progress import Progress
from zloss.errors import ZlossError
from zloss.models.checkpoint import Checkpoint
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead
from zloss.results.implementation_audit import AppliedLoss, Fp16Room, StoredLogits, UpdateErrors
from zloss.source.objective import Objective
from zloss.source.objectives.registry import make_objective
from zloss.text.blocks import Blocks

LEFT_OUT = ("cut-cross-entropy",)
"""Implementations that run only where they are named: a compiler works for minutes before the first number."""

Note = Callable[[str], None]


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


def chosen_implementations(config: ImplementationAuditConfig, note: Note) -> tuple[Implementation, ...]:
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
    note: Note,
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
    note: Note,
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
