"""audit:implementations: what every known implementation of CE + Z injects, on the logits of a real model.

    zloss reproduce audit:implementations

This is not a table of the paper. It applies the paper's source and kernel audits to implementations in use: ours,
PyTorch's, and Liger, flash-attn and cut-cross-entropy where they are installed. Losses that take logits read stored ones.
Losses that project get hidden states and head in the storage dtype, and are compared with fp64 of the same rounded inputs.

    Δ_tot, Δ_Z        against the logits before storage (projecting losses: at the hidden states)
    kernel Δ_Z        against fp64 of what the loss was given, its 16-bit output included
    Δ_src             our projecting backends: the logit source itself, in fp32
"""

from __future__ import annotations

from dataclasses import dataclass

from zloss.audit.implementation.implementations import IMPLEMENTATIONS, find_implementation
from zloss.errors import ZlossError
from zloss_paper.engine.audited_models import paper_target
from zloss_paper.engine.inputs import WIKITEXT
from zloss_paper.engine.recipe import Overrides, Profile, Recipe, RecipeResult
from zloss_paper.engine.table import Line, Table, cells_from
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.recipe import (
    ImplementationConfig,
    audit_kernel,
    audit_line,
    audited_models,
    tokens_per_block,
)

LABEL = "audit:implementations"
COLUMNS = {
    "rel_forward_error": "forward",
    "delta_total": "delta_total",
    "delta_z": "delta_z",
    "kernel_delta_z": "kernel_delta_z",
    "delta_weight": "delta_weight",
    "delta_src": "delta_src.mean",
}
"""The columns, and where an audit of a loss has them."""
TARGETS = (paper_target("GPT-2", WIKITEXT, 8),)
EMPTY = (
    "losses that take logits have no gradient at W, and Δ_Z is their source; of projecting losses Δ_src is read where they "
    "are ours and run in this process",
    "F.linear_cross_entropy and cut-cross-entropy have no Z",
)
"""Why cells are empty."""


@dataclass(frozen=True)
class ImplementationsConfig(ImplementationConfig):
    """Which implementations, in addition to what every audit of this kind states."""

    names: tuple[str, ...] = tuple(IMPLEMENTATIONS)


def configure(profile: Profile, overrides: Overrides) -> ImplementationsConfig:
    """The model, and fp32 and bf16 at the natural scale; the same few tokens for every implementation."""
    models = audited_models(LABEL, TARGETS, profile, overrides, cpu_blocks=4)
    # A compiler would run longer than all the rest of a smoke test.
    names = tuple(name for name in IMPLEMENTATIONS if profile != "smoke" or name != "cut-cross-entropy")
    tokens = tokens_per_block(profile)
    return ImplementationsConfig(models, ("fp32", "bf16"), (1,), tokens_per_block=tokens, names=names)


def run(config: ImplementationsConfig, bench: Workbench) -> RecipeResult:
    """One row per implementation and dtype; notes say why an implementation could not run."""
    lines: list[Line] = []
    notes = dict.fromkeys((*EMPTY, f"every row uses {config.tokens_per_block} tokens of each block"))
    for model in config.models.rows:
        for implementation in map(find_implementation, config.names):
            if not implementation.installed:
                notes[f"{implementation.title}: not installed"] = None
                continue
            try:
                audited = audit_kernel(
                    bench, model.audit, config, name=implementation.name, same_tokens=True, note=notes.setdefault
                )
            except ZlossError as error:
                notes[f"{implementation.title} on {model.model}: {error}"] = None
                continue
            for found in audited:
                own = {"implementation": implementation.title, "dtype": found.storage}
                lines.append(audit_line(model, own, cells_from(found, COLUMNS), corpus=False, beside=False))
    return RecipeResult(Table(tuple(lines)), tuple(notes), config.models.texts)


RECIPES = (Recipe(LABEL, "What implementations of CE + Z inject", tuple(COLUMNS), configure, run),)
