"""A recipe that audits implementations over storage dtypes and logit multipliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zloss.audit.implementation.source import Storage
from zloss_paper.engine.audited_models import Target
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.setting import CPU_BLOCKS, ImplementationConfig, audited_models


def implementation_recipe(
    label: str,
    title: str,
    run: Callable[[ImplementationConfig, Workbench], RecipeResult],
    *,
    columns: tuple[str, ...],
    targets: Sequence[Target],
    storages: tuple[Storage, ...],
    logit_scales: tuple[int, ...],
    claims: tuple[Claim, ...],
    choices: Mapping[str, str],
    cpu_blocks: int = CPU_BLOCKS,
    tokens_per_block: Callable[[Profile], int] | None = None,
) -> Recipe[ImplementationConfig]:
    """The recipe of `label`: its targets at every storage and multiplier. `tokens_per_block` None takes every token."""

    def configure(profile: Profile, overrides: Overrides) -> ImplementationConfig:
        models = audited_models(label, targets, profile, overrides, cpu_blocks=cpu_blocks)
        tokens = None if tokens_per_block is None else tokens_per_block(profile)
        return ImplementationConfig(models, storages, logit_scales, tokens_per_block=tokens)

    return Recipe(
        label=label,
        title=title,
        columns=columns,
        configure=configure,
        run=run,
        paper=paper_table(label, integer_keys=("logit_scale",)),
        claims=claims,
        choices=choices,
    )
