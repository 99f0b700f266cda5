"""A recipe that reads audits of output heads: its audits follow from its targets, its lines from the audits' reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from zloss_paper.engine.audited_models import AuditTableConfig, Target, audit_table
from zloss_paper.engine.claim import Claim
from zloss_paper.engine.paper_table import PaperTable, paper_table
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.workbench import Workbench
from zloss_paper.heads.lines import run_head_table

Run = Callable[[AuditTableConfig, Workbench], RecipeResult]


def head_recipe(
    label: str,
    title: str,
    *,
    columns: tuple[str, ...],
    targets: Sequence[Target],
    claims: tuple[Claim, ...],
    choices: Mapping[str, str],
    paper: PaperTable | None = None,
    deployed: bool = False,
    with_corpus: bool = False,
    run: Run | None = None,
) -> Recipe[AuditTableConfig]:
    """The recipe of `label`: a raw and a centered line per target, unless it has a `run` of its own.

    `deployed` measures the perplexity of the centered logits as deployed; `with_corpus` puts the corpus into the key.
    """

    def configure(profile: Profile, overrides: Overrides) -> AuditTableConfig:
        return audit_table(label, targets, profile, overrides, deployed=deployed)

    def raw_and_centered(config: AuditTableConfig, bench: Workbench) -> RecipeResult:
        return run_head_table(config, bench, columns, with_corpus=with_corpus)

    return Recipe(
        label=label,
        title=title,
        columns=columns,
        configure=configure,
        run=run or raw_and_centered,
        paper=paper or paper_table(label),
        claims=claims,
        choices=choices,
    )
