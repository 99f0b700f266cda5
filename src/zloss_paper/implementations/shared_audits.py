"""What the recipes of the implementation audits share: models and texts, and audits that several of them read.

An audit that two recipes of one call ask for runs once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zloss.audit.checkpoint.config import AuditConfig
from zloss.audit.implementation.evaluate import interpreted
from zloss.audit.implementation.implementations import find_implementation
from zloss.audit.implementation.kernels import KernelRow, kernel_row
from zloss.audit.implementation.source import SourceRow, source_audit
from zloss.audit.implementation.storage import ReferenceHead, Storage
from zloss.audit.implementation.update import UpdateRow, update_audit
from zloss.models.head_check import check_head
from zloss.models.output_head import OutputHead, find_head
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.table import Key
from zloss_paper.engine.workbench import Workbench, text_blocks
from zloss_paper.heads.audit_rows import AuditRow, AuditTableConfig, Target, audit_table

COEF = 1e-4
"""λ of the source, kernel and update audits; the paper states none. Z alone does not depend on it, the total hardly."""
CPU_BLOCKS = 8
INTERPRETED_TOKENS = 16
"""Tokens of each block that go through Triton's interpreter, which takes about 70 rows a second."""

MODELS = {
    "model_ids": "the checkpoints gpt2 and gpt2-medium on the hub",
    "corpus_variant": "the raw variant, wikitext-103-raw-v1",
    "corpora": "WikiText-103: the validation split, raw variant; FineWeb-Edu: from the start of the sample",
    "block_size": "256",
    "lambda_value": "1e-4",
    "seed_values": "none; nothing here is random",
}
"""Choices that the recipes of these audits share."""

Result = TypeVar("Result")
_KEPT: WeakKeyDictionary[Workbench, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def choices(*settings: str, **own: str) -> dict[str, str]:
    """The shared choices for `settings`, and those of one recipe."""
    return {**{setting: MODELS[setting] for setting in settings}, **own}


@dataclass(frozen=True)
class ImplementationConfig:
    """The complete setting of a recipe of the implementation audits."""

    models: AuditTableConfig
    """Which model on which text; only model, text and blocks are read."""
    storages: tuple[Storage, ...]
    logit_scales: tuple[int, ...]
    coef: float = COEF
    tokens_per_block: int | None = None
    """Tokens of a block that are audited, evenly spread; None: all."""


def audited_models(
    label: str, targets: Sequence[Target], profile: Profile, overrides: Overrides, *, cpu_blocks: int = CPU_BLOCKS
) -> AuditTableConfig:
    """The models and texts of a recipe; on the cpu profile at a count of its own."""
    if profile == "cpu" and overrides.blocks is None:
        overrides = replace(overrides, blocks=cpu_blocks)
    return audit_table(label, targets, profile, overrides)


@dataclass(frozen=True)
class HeadTokens:
    """What the head of a model receives on a text, with the labels: T tokens, blocks one after the other."""

    head: OutputHead
    hidden_TD: Tensor
    label_T: Tensor
    block_size: int

    @property
    def target(self) -> float:
        """c = log V of the head."""
        return math.log(self.head.vocab)

    def thinned(self, per_block: int | None) -> HeadTokens:
        """Every block reduced to `per_block` evenly spread tokens."""
        if per_block is None or per_block >= self.block_size:
            return self
        inside = torch.linspace(0, self.block_size - 1, per_block).long()
        starts = torch.arange(0, len(self.label_T), self.block_size)
        chosen = (starts.unsqueeze(1) + inside).flatten()
        return HeadTokens(self.head, self.hidden_TD[chosen], self.label_T[chosen], per_block)


def head_tokens(bench: Workbench, audit: AuditConfig) -> HeadTokens:
    """Hidden states and labels of the text, the head checked against the model's own logits."""

    def run() -> HeadTokens:
        checkpoint = bench.checkpoint(audit)
        head, blocks = find_head(checkpoint), text_blocks(audit, checkpoint)
        check_head(checkpoint, head, blocks.inputs(0, 1)[0])
        return HeadTokens(head, bench.hidden(audit), blocks.targets(0, blocks.count).flatten(), blocks.size)

    return once(bench, ("tokens", audit), run)


def source_rows(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[SourceRow, ...]:
    """The source audit of one model on one text."""

    def run() -> tuple[SourceRow, ...]:
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

    return once(bench, ("source", audit, config.storages, config.logit_scales, config.coef), run)


def kernel_rows(
    bench: Workbench, audit: AuditConfig, config: ImplementationConfig, name: str, *, same_tokens: bool = False
) -> tuple[KernelRow, ...]:
    """The kernel audit of one implementation on the logits of one model on one text.

    Only Triton's interpreter is spared most tokens, unless `same_tokens` asks for the same ones everywhere.
    """
    implementation = find_implementation(name)
    thin = config.tokens_per_block if same_tokens or interpreted(implementation) else None

    def run() -> tuple[KernelRow, ...]:
        tokens = head_tokens(bench, audit).thinned(thin)
        head = ReferenceHead.of(tokens.head)
        combinations = [(storage, scale) for storage in config.storages for scale in config.logit_scales]
        with bench.progress.step(implementation.title, len(tokens.label_T) * len(combinations)) as step:
            return tuple(
                kernel_row(
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
    return once(bench, key, run)


def update_rows(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[UpdateRow, ...]:
    """The update audit of one model on one text, both storages in one pass over the model."""

    def run() -> tuple[UpdateRow, ...]:
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

    return once(bench, ("update", audit, config.storages, config.logit_scales, config.coef), run)


def once(bench: Workbench, key: tuple[Any, ...], run: Callable[[], Result]) -> Result:
    """What `run` gives, the first time it is asked of this workbench."""
    kept = _KEPT.setdefault(bench, {})
    if key not in kept:
        kept[key] = run()
    result: Result = kept[key]
    return result


def line_keys(row: AuditRow, own: dict[str, Key], *, corpus: bool) -> tuple[dict[str, Key], dict[str, Key]]:
    """(our key, key of the paper's line beside it): model and corpus in front of what the row is about."""
    key: dict[str, Key] = {"model": row.model, **({"corpus": row.corpus} if corpus else {}), **own}
    beside: dict[str, Key] = {**({"corpus": row.beside_corpus} if corpus else {}), **own}
    return key, beside
