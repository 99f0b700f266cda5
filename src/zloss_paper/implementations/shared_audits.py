"""Audits that several recipes read: one that two recipes of a call ask for runs once."""

from __future__ import annotations

import math

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.implementation.implementations import find_implementation, interpreted
from zloss.audit.implementation.kernels import KernelLine, kernel_line
from zloss.audit.implementation.source import ReferenceHead, SourceLine, source_audit
from zloss.audit.implementation.update import UpdateLine, update_audit
from zloss.models.output_head import check_head, find_head
from zloss_paper.engine.workbench import Workbench, text_blocks
from zloss_paper.implementations.head_tokens import head_tokens
from zloss_paper.implementations.setting import ImplementationConfig


def shared_source_audit(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[SourceLine, ...]:
    """The source audit of one model on one text."""

    def run() -> tuple[SourceLine, ...]:
        tokens = head_tokens(bench, audit)
        with bench.progress.step("stored logits", len(tokens.label_T)) as step:
            return source_audit(
                ReferenceHead.of(tokens.head),
                tokens.hidden_TD,
                block_size=tokens.block_size,
                storages=config.storages,
                logit_scales=config.logit_scales,
                coef=config.coef,
                target=tokens.target,
                advance=step.advance,
            )

    return bench.once(("source", audit, config.storages, config.logit_scales, config.coef), run)


def shared_kernel_audit(
    bench: Workbench, audit: AuditConfig, config: ImplementationConfig, name: str, *, same_tokens: bool = False
) -> tuple[KernelLine, ...]:
    """The kernel audit of one implementation on the logits of one model on one text.

    Triton's interpreter audits `config.tokens_per_block` tokens of each block; with `same_tokens` every implementation does.
    """
    implementation = find_implementation(name)
    thin = config.tokens_per_block if same_tokens or interpreted(implementation) else None

    def run() -> tuple[KernelLine, ...]:
        tokens = head_tokens(bench, audit).thinned(thin)
        head = ReferenceHead.of(tokens.head)
        combinations = [(storage, scale) for storage in config.storages for scale in config.logit_scales]
        with bench.progress.step(implementation.title, len(tokens.label_T) * len(combinations)) as step:
            return tuple(
                kernel_line(
                    implementation,
                    head,
                    tokens.hidden_TD,
                    tokens.label_T,
                    storage=storage,
                    logit_scale=scale,
                    coef=config.coef,
                    target=tokens.target,
                    advance=step.advance,
                )
                for storage, scale in combinations
            )

    key = ("kernel", name, audit, config.storages, config.logit_scales, config.coef, thin)
    return bench.once(key, run)


def shared_update_audit(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[UpdateLine, ...]:
    """The update audit of one model on one text, both storages in one pass over the model."""

    def run() -> tuple[UpdateLine, ...]:
        checkpoint = bench.checkpoint(audit)
        head, blocks = find_head(checkpoint), text_blocks(audit, checkpoint)
        check_head(checkpoint, head, blocks.inputs(0, 1)[0])
        with bench.progress.step("updates", blocks.predictions * len(config.logit_scales)) as step:
            return update_audit(
                checkpoint,
                head,
                blocks,
                storages=config.storages,
                logit_scales=config.logit_scales,
                coef=config.coef,
                target=math.log(head.vocab),
                advance=step.advance,
            )

    return bench.once(("update", audit, config.storages, config.logit_scales, config.coef), run)
