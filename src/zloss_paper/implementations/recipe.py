"""A recipe that audits implementations of CE + Z: its setting, the tokens it reads, and the audits that recipes share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from zloss.audit.config import AuditConfig
from zloss.audit.implementation.gradients import update_audit
from zloss.audit.implementation.implementations import find_implementation, interpreted
from zloss.audit.implementation.kernels import KernelLine, kernel_line
from zloss.audit.implementation.source import SourceLine, source_audit
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, check_head, find_head
from zloss.results.implementation_audit import UpdateErrors
from zloss.results.options import LogitStorage
from zloss.text import Blocks
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig, Target, audit_table
from zloss_paper.engine.claims import Claim
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Cell, Key, Line, Table, cells_from, paper_table
from zloss_paper.engine.workbench import Workbench, text_blocks

COEF = 1e-4
"""λ of the source, kernel and update audits; the paper states none. Z alone does not depend on it, the total hardly."""
CPU_BLOCKS = 8
INTERPRETED_TOKENS = 16
"""Tokens of each block that go through Triton's interpreter, which takes about 70 rows of logits a second."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class ImplementationConfig:
    """The complete setting of a recipe, as its result file holds it."""

    models: AuditTableConfig
    """Which model on which text; only model, text and blocks are read."""
    storages: tuple[LogitStorage, ...]
    logit_scales: tuple[int, ...]
    coef: float = COEF
    tokens_per_block: int | None = None
    """Tokens of a block that are audited, evenly spread; None: all."""


Run = Callable[[ImplementationConfig, Workbench], RecipeResult]
Audit = Callable[[Workbench, AuditConfig, ImplementationConfig], Sequence[Found]]
LinesOf = Callable[[AuditedModel, Sequence[Found]], Iterable[Line]]


def implementation_recipe(
    label: str,
    title: str,
    run: Run,
    *,
    columns: Iterable[str],
    targets: Sequence[Target],
    storages: tuple[LogitStorage, ...],
    logit_scales: tuple[int, ...],
    claims: tuple[Claim, ...],
    cpu_blocks: int = CPU_BLOCKS,
    kernel: bool = False,
) -> Recipe[ImplementationConfig]:
    """The recipe of `label`: its targets at every storage and multiplier. A `kernel` may need Triton's interpreter."""

    def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
        models = audited_models(label, targets, profile, overrides, cpu_blocks=cpu_blocks)
        tokens = tokens_per_block(profile) if kernel else None
        return ImplementationConfig(models, storages, logit_scales, tokens_per_block=tokens)

    paper = paper_table(label, "logit_scale")
    return Recipe(label, title, tuple(columns), configure, run, paper, claims)


def audited_models(
    label: str, targets: Sequence[Target], profile: Profile, overrides: Overrides, *, cpu_blocks: int = CPU_BLOCKS
) -> AuditTableConfig:
    """The models and texts of a recipe; on the cpu profile at a separate count."""
    if profile == "cpu" and overrides.blocks is None:
        overrides = replace(overrides, blocks=cpu_blocks)
    return audit_table(label, targets, profile, overrides)


def tokens_per_block(profile: Profile) -> int:
    """Tokens of each block for Triton's interpreter."""
    return 2 if profile == "smoke" else INTERPRETED_TOKENS


def run_audits(audit: Audit[Found], lines_of: LinesOf[Found], *, details: str = "") -> Run:
    """A run that audits every model and makes lines of what it finds; under `details` the JSON file has all of it."""

    def run(config: ImplementationConfig, bench: Workbench) -> RecipeResult:
        audited = [(model, shared(audit, bench, model.audit, config)) for model in config.models.rows]
        lines = tuple(line for model, found in audited for line in lines_of(model, found))
        kept = {details: [one for model, found in audited for one in audit_details(model, found)]} if details else {}
        return RecipeResult(Table(lines), texts=config.models.texts, details=kept)

    return run


def audit_details(model: AuditedModel, audited: Iterable[object]) -> list[dict[str, object]]:
    """Everything an audit measured of a model, for the JSON file."""
    return [{"model": model.model, "corpus": model.corpus, "row": one} for one in audited]


def audit_line(
    model: AuditedModel, own: Mapping[str, Key], cells: Mapping[str, Cell], *, corpus: bool = True, beside: bool = True
) -> Line:
    """A line whose key is model, corpus and `own`, next to the paper's line of the same `own` unless `beside` is off."""
    key = {"model": model.model, **({"corpus": model.corpus} if corpus else {}), **own}
    papers = {"model": model.beside, "corpus": model.beside_corpus, **own} if beside else {}
    return Line(key, cells, {}, model.deviations, papers)


def stored_lines(
    model: AuditedModel, audited: Iterable[Any], *, columns: Mapping[str, str], left_out: str = "", corpus: bool = True
) -> list[Line]:
    """A line per storage, other than `left_out`, and multiplier; `columns` says where an audit has the numbers."""
    lines = []
    for found in audited:
        if found.storage != left_out:
            own = {"storage": found.storage, "logit_scale": int(found.logit_scale)}
            lines.append(audit_line(model, own, cells_from(found, columns), corpus=corpus))
    return lines


@dataclass(frozen=True)
class HeadTokens:
    """What the output head receives on a text: hidden states [T, D] and labels [T], blocks one after the other."""

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


def opened(bench: Workbench, audit: AuditConfig) -> tuple[Checkpoint, OutputHead, Blocks]:
    """The model, its head, checked against the model's own logits, and the blocks of the text."""
    checkpoint = bench.checkpoint(audit)
    head, blocks = find_head(checkpoint), text_blocks(audit, checkpoint)
    check_head(checkpoint, head, blocks.inputs(0, 1)[0])
    return checkpoint, head, blocks


def head_tokens(bench: Workbench, audit: AuditConfig) -> HeadTokens:
    """Hidden states and labels of the text."""

    def run() -> HeadTokens:
        _, head, blocks = opened(bench, audit)
        return HeadTokens(head, bench.hidden(audit), blocks.targets(0, blocks.count).flatten(), blocks.size)

    return bench.once(("tokens", audit), run)


def shared(audit: Audit[Found], bench: Workbench, source: AuditConfig, config: ImplementationConfig) -> Sequence[Found]:
    """What `audit` finds, made once for all recipes with the same model, text, storages, multipliers and λ."""
    key = (audit, source, config.storages, config.logit_scales, config.coef, config.tokens_per_block)
    return bench.once(key, lambda: audit(bench, source, config))


def audit_sources(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[SourceLine, ...]:
    """The source audit of one model on one text."""
    tokens = head_tokens(bench, audit)
    with bench.progress.step("stored logits", len(tokens.label_T)) as step:
        return source_audit(
            tokens.head,
            tokens.hidden_TD,
            block_size=tokens.block_size,
            storages=config.storages,
            logit_scales=config.logit_scales,
            coef=config.coef,
            target=tokens.target,
            advance=step.advance,
        )


def audit_kernel(
    bench: Workbench,
    audit: AuditConfig,
    config: ImplementationConfig,
    *,
    name: str,
    same_tokens: bool = False,
    note: Callable[[str], None] = lambda sentence: None,
) -> tuple[KernelLine, ...]:
    """The kernel audit of one implementation on the head's input of one model on one text.

    Triton's interpreter audits `config.tokens_per_block` tokens of each block; with `same_tokens` every implementation does.
    """
    implementation = find_implementation(name)
    thin = config.tokens_per_block if same_tokens or interpreted(implementation) else None
    tokens = head_tokens(bench, audit).thinned(thin)
    combinations = [(storage, scale) for storage in config.storages for scale in config.logit_scales]
    with bench.progress.step(implementation.title, len(tokens.label_T) * len(combinations)) as step:
        return tuple(
            kernel_line(
                implementation,
                tokens.head,
                tokens.hidden_TD,
                tokens.label_T,
                storage=storage,
                logit_scale=scale,
                coef=config.coef,
                target=tokens.target,
                advance=step.advance,
                note=note,
            )
            for storage, scale in combinations
        )


def audit_updates(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> tuple[UpdateErrors, ...]:
    """The update audit of one model on one text, both storages in one pass over the model."""
    checkpoint, head, blocks = opened(bench, audit)
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
