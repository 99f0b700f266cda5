"""The sections of an implementation audit: each runs one of the audits of this room and returns its lines as records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zloss.audit.implementation.audited_head import AuditedHead
from zloss.audit.implementation.config import ImplementationAuditConfig
from zloss.audit.implementation.overflow import OverflowLine, overflow_audit
from zloss.audit.implementation.source import source_audit
from zloss.audit.implementation.storage import ReferenceHead
from zloss.audit.implementation.update import update_audit
from zloss.console.progress import Progress
from zloss.objectives import Objective, make_objective
from zloss.results.implementation_audit import Fp16Room, StoredLogits, UpdateErrors

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
