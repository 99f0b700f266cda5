"""The section of implementations: every chosen loss in every dtype, on a few tokens of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zloss.audit.implementation.audited_head import AuditedHead
from zloss.audit.implementation.config import NO_IMPLEMENTATION, ImplementationAuditConfig, Storage
from zloss.audit.implementation.evaluate import interpreted
from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation
from zloss.audit.implementation.kernels import kernel_line
from zloss.audit.implementation.linear_kernels import linear_line
from zloss.audit.implementation.storage import ReferenceHead
from zloss.console.progress import Progress
from zloss.errors import ZlossError
from zloss.results.implementation_audit import AppliedLoss

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
