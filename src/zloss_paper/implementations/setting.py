"""The setting of a recipe that audits implementations: models and texts, storage dtypes, logit multipliers, our choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zloss.audit.implementation.source import Storage
from zloss_paper.engine.audited_models import AuditTableConfig, Target, audit_table
from zloss_paper.engine.profile import Overrides, Profile

COEF = 1e-4
"""λ of the source, kernel and update audits; the paper states none. Z alone does not depend on it, the total hardly."""
CPU_BLOCKS = 8
INTERPRETED_TOKENS = 16
"""Tokens of each block that go through Triton's interpreter, which takes about 70 rows of logits a second."""

CHOICES = {
    "model_ids": "the checkpoints gpt2 and gpt2-medium on the hub",
    "corpus_variant": "the raw variant, wikitext-103-raw-v1",
    "corpora": "WikiText-103: the validation split, raw variant; FineWeb-Edu: from the start of the sample",
    "block_size": "256",
    "lambda_value": "1e-4",
    "seed_values": "none; nothing here is random",
}
"""Choices that the recipes of these audits share."""


def choices(*settings: str, **own: str) -> dict[str, str]:
    """The shared choices for `settings`, and those of one recipe."""
    return {**{setting: CHOICES[setting] for setting in settings}, **own}


@dataclass(frozen=True)
class ImplementationConfig:
    """The complete setting of a recipe, as its result file holds it."""

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


def tokens_per_block(profile: Profile) -> int:
    """Tokens of each block for Triton's interpreter."""
    return 2 if profile == "smoke" else INTERPRETED_TOKENS
