"""The audited models of a table: one typed audit per model and corpus, at every profile.

The paper profile has the paper's own counts. The other profiles have one small setting that all audit recipes share, so
that one audit serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zloss.audit.config import AuditConfig
from zloss.errors import InputError
from zloss.results.options import SMOLLM2
from zloss_paper.engine.inputs import CORPUS_NAMES, MODEL_IDS, TextSource, papers_model, printed_name, text_sources
from zloss_paper.engine.recipe import Overrides, Profile

CPU = AuditConfig(model=SMOLLM2, blocks=32, block_size=256, gradient_blocks=8, batch_blocks=4)
SMOKE = AuditConfig(model=SMOLLM2, blocks=2, block_size=32, gradient_blocks=1, batch_blocks=2)
SMALL = {"cpu": CPU, "smoke": SMOKE}


@dataclass(frozen=True)
class Target:
    """One line of the paper: a model on a corpus, with the audit at its scale."""

    model: str
    corpus: str
    audit: AuditConfig


@dataclass(frozen=True)
class AuditedModel:
    """One audit to run, and the line of the paper next to which it is printed."""

    model: str
    """As printed: the paper's name, or the name of another model."""
    corpus: str
    beside: str
    """The paper's model in that line."""
    beside_corpus: str
    audit: AuditConfig
    deviations: tuple[str, ...]
    """How it differs from that row; empty: the numbers are comparable."""


@dataclass(frozen=True)
class AuditTableConfig:
    """The complete setting of a recipe that reads audits, as its result file holds it."""

    label: str
    profile: Profile
    rows: tuple[AuditedModel, ...]
    """The audited models; the result file has them under this key."""
    texts: tuple[TextSource, ...]
    deployed: bool = False
    """Also measure the perplexity of the centered logits as deployed."""


def paper_target(model: str, corpus: str, blocks: int, **settings: object) -> Target:
    """A line at the paper's scale: fp32, the first blocks of the corpus, all rows of the head, λ_diag = 1e-4."""
    base = AuditConfig(
        model=MODEL_IDS[model], corpus=CORPUS_NAMES[corpus], blocks=blocks, block_size=256, gradient_blocks=0
    )
    return Target(model, corpus, replace(base, **settings))  # type: ignore[arg-type]


def audit_table(
    label: str,
    targets: Sequence[Target],
    profile: Profile,
    overrides: Overrides,
    *,
    deployed: bool = False,
) -> AuditTableConfig:
    """The audits of a table; a model that is not the paper's is printed next to the paper's GPT-2, or its first model."""
    models = list(_audited(targets, profile, overrides))
    # One text for two corpora makes two lines of one name: the one with fewer deviations stays.
    unique: dict[tuple[str, str], AuditedModel] = {}
    for model in sorted(models, key=lambda model: len(model.deviations)):
        unique.setdefault((model.model, model.corpus), model)
    kept = tuple(model for model in models if model in unique.values())
    stated = overrides.text_source
    sources = {text: None for model in kept for text in text_sources(model.audit.texts, model.audit.corpus, stated)}
    return AuditTableConfig(label, profile, kept, tuple(sources), deployed)


def _audited(targets: Sequence[Target], profile: Profile, overrides: Overrides) -> Iterator[AuditedModel]:
    """The models to audit, each with the line of the paper next to which it is printed."""
    if not overrides.models and profile == "paper":
        for target in targets:
            yield _audited_model(target.model, target.audit.model, True, target, profile, overrides)
        return
    for word in overrides.models or (SMOLLM2,):
        known, folder = papers_model(word)
        if known is not None:
            lines = [target for target in targets if target.model == known]
            if not lines:
                have = ", ".join(dict.fromkeys(target.model for target in targets))
                raise InputError(f"`models` has {word!r}, but this table has no {known}; it has {have}.")
            for line in lines:
                yield _audited_model(known, folder or line.audit.model, True, line, profile, overrides)
            continue
        # Another model is printed next to one line per corpus, at the largest count of the table.
        for corpus in dict.fromkeys(target.corpus for target in targets):
            here = [target for target in targets if target.corpus == corpus]
            line = next((target for target in here if target.model == "GPT-2"), here[0])
            count = max(target.audit.blocks or 0 for target in here)
            largest = replace(line, audit=replace(line.audit, blocks=count))
            yield _audited_model(printed_name(word), word, False, largest, profile, overrides)


def _audited_model(
    printed: str, source: str, of_the_paper: bool, target: Target, profile: Profile, overrides: Overrides
) -> AuditedModel:
    audit = replace(target.audit if profile == "paper" else SMALL[profile], model=source)
    if overrides.texts:
        audit = replace(audit, texts=overrides.texts, corpus=None)
    if overrides.blocks is not None:
        audit = replace(audit, blocks=overrides.blocks or None)
    if overrides.block_size is not None:
        audit = replace(audit, block_size=overrides.block_size)
    sources = text_sources(audit.texts, audit.corpus, overrides.text_source)
    same_text = {text.corpus for text in sources} == {target.corpus}
    deviations = []
    if not of_the_paper:
        deviations.append(f"the model is {printed}, not the paper's")
    if not same_text:
        deviations.append(f"the text is {' + '.join(text.title for text in sources)}, not {target.corpus}")
    if (audit.blocks, audit.block_size) != (target.audit.blocks, target.audit.block_size):
        counts = f"{audit.blocks or 'all'} blocks of {audit.block_size}"
        deviations.append(f"{counts}, not {target.audit.blocks} of {target.audit.block_size}")
    if audit.svd != target.audit.svd:
        deviations.append(f"the spectrum is {audit.svd}, not {target.audit.svd}")
    corpus = target.corpus if same_text else " + ".join(text.corpus or text.name for text in sources)
    return AuditedModel(printed, corpus, target.model, target.corpus, audit, tuple(deviations))
