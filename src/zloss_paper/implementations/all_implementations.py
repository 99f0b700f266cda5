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

from zloss.audit.implementation.implementations import IMPLEMENTATIONS, Implementation, find_implementation
from zloss.audit.implementation.kernels import LinearLine, linear_line
from zloss.audit.implementation.source import Storage
from zloss.errors import ZlossError
from zloss_paper.engine.audited_models import AuditedModel, paper_target
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.recipe import Recipe, RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.texts import WIKITEXT
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.head_tokens import head_tokens
from zloss_paper.implementations.setting import ImplementationConfig, audited_models, tokens_per_block
from zloss_paper.implementations.shared_audits import shared_kernel_audit

LABEL = "audit:implementations"
COLUMNS = ("rel_forward_error", "delta_total", "delta_z", "kernel_delta_z", "delta_weight", "delta_src")
TARGETS = (paper_target("GPT-2", WIKITEXT, 8),)
STORAGES: tuple[Storage, ...] = ("fp32", "bf16")
SCALES = (1,)
EMPTY = (
    "losses that take logits have no gradient at W, and Δ_Z is their source; of projecting losses Δ_src is read where they "
    "are ours and run in this process",
    "F.linear_cross_entropy and cut-cross-entropy have no Z",
)
"""Why cells are empty."""


@dataclass(frozen=True)
class ImplementationsConfig(ImplementationConfig):
    """Which implementations, beside what every audit of this kind states."""

    names: tuple[str, ...] = tuple(IMPLEMENTATIONS)


def configure(profile: Profile, overrides: Overrides) -> ImplementationsConfig:
    """The model, and fp32 and bf16 at the natural scale; the same few tokens for every implementation."""
    models = audited_models(LABEL, TARGETS, profile, overrides, cpu_blocks=4)
    # A compiler would run longer than all the rest of a smoke test.
    names = tuple(name for name in IMPLEMENTATIONS if profile != "smoke" or name != "cut-cross-entropy")
    tokens = tokens_per_block(profile)
    return ImplementationsConfig(models, STORAGES, SCALES, tokens_per_block=tokens, names=names)


def run(config: ImplementationsConfig, bench: Workbench) -> RecipeResult:
    """A line per implementation and dtype; what cannot run here says why."""
    lines: list[Line] = []
    notes = dict.fromkeys((*EMPTY, f"every line rests on {config.tokens_per_block} tokens of each block"))
    for model in config.models.rows:
        for implementation in map(find_implementation, config.names):
            if not implementation.installed:
                notes[f"{implementation.title}: not installed"] = None
                continue
            try:
                found = _logits if implementation.takes == "logits" else _linear
                lines += found(config, bench, model, implementation, notes)
            except ZlossError as error:
                notes[f"{implementation.title} on {model.model}: {error}"] = None
    return RecipeResult(Table(tuple(lines)), tuple(notes), config.models.texts)


def _key(model: AuditedModel, implementation: Implementation, dtype: str) -> dict[str, Key]:
    return {"model": model.model, "implementation": implementation.title, "dtype": dtype}


def _logits(
    config: ImplementationConfig,
    bench: Workbench,
    model: AuditedModel,
    implementation: Implementation,
    notes: dict[str, None],
) -> list[Line]:
    lines = []
    for found in shared_kernel_audit(bench, model.audit, config, implementation.name, same_tokens=True):
        values = {
            "rel_forward_error": found.forward,
            "delta_total": found.delta_total,
            "delta_z": found.delta_z,
            "kernel_delta_z": found.kernel_delta_z,
        }
        lines.append(Line(_key(model, implementation, found.storage), cells_of(values), {}, model.deviations))
    return lines


def _linear(
    config: ImplementationConfig,
    bench: Workbench,
    model: AuditedModel,
    implementation: Implementation,
    notes: dict[str, None],
) -> list[Line]:
    tokens = head_tokens(bench, model.audit).thinned(config.tokens_per_block)
    lines = []
    with bench.progress.step(implementation.title, len(config.storages), "dtypes") as step:
        for dtype in config.storages:
            found = linear_line(
                implementation,
                tokens.head,
                tokens.hidden_TD,
                tokens.label_T,
                inputs=dtype,
                logit_scale=1,
                coef=config.coef,
                target=tokens.target,
                note=lambda sentence: notes.setdefault(sentence),
            )
            lines.append(_linear_line(model, implementation, found))
            step.advance(1)
    return lines


def _linear_line(model: AuditedModel, implementation: Implementation, found: LinearLine) -> Line:
    values = {
        "rel_forward_error": found.forward,
        "delta_total": found.delta_total,
        "delta_z": found.delta_z,
        "kernel_delta_z": found.kernel_delta_z,
        "delta_weight": found.delta_weight,
        "delta_src": None if found.delta_src is None else found.delta_src.mean,
    }
    return Line(_key(model, implementation, found.inputs), cells_of(values), {}, model.deviations)


RECIPE = Recipe(
    label=LABEL,
    title="What implementations of CE + Z inject",
    columns=COLUMNS,
    configure=configure,
    run=run,
)
