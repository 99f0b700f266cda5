"""The audited models of a table: one typed audit per model and corpus, at every profile.

The paper profile has the paper's own counts. The other profiles have one small setting that all audit recipes share, so
that one audit serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zloss.audit.checkpoint.config import AuditConfig
from zloss.errors import InputError
from zloss.results.choices import SMOLLM2
from zloss_paper.engine.paper_models import MODEL_IDS, given_model
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.texts import CORPUS_NAMES, TextSource, text_sources

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
    """One audit to run, and the line of the paper it is printed beside."""

    model: str
    """As printed: the paper's name, or the name of another model."""
    corpus: str
    beside: str
    """The paper's model in the line beside it."""
    beside_corpus: str
    audit: AuditConfig
    deviations: tuple[str, ...]
    """In what it differs from that line; empty: the numbers are comparable."""


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
    beside: str = "GPT-2",
    deployed: bool = False,
) -> AuditTableConfig:
    """The audits of a table; a model that is not the paper's is printed beside the paper's `beside`."""
    models = [_audited(choice, profile, overrides) for choice in _chosen(targets, profile, overrides, beside)]
    # One text for two corpora makes two lines of one name: the one with fewer deviations stays.
    unique: dict[tuple[str, str], AuditedModel] = {}
    for model in sorted(models, key=lambda model: len(model.deviations)):
        unique.setdefault((model.model, model.corpus), model)
    kept = tuple(model for model in models if model in unique.values())
    sources = {text: None for model in kept for text in _sources(model.audit, overrides)}
    return AuditTableConfig(label, profile, kept, tuple(sources), deployed)


@dataclass(frozen=True)
class _Choice:
    """A model to audit, and the line of the paper it stands beside."""

    printed: str
    source: str
    """Where to load it."""
    of_the_paper: bool
    target: Target


def _chosen(targets: Sequence[Target], profile: Profile, overrides: Overrides, beside: str) -> list[_Choice]:
    if not overrides.models and profile == "paper":
        return [_Choice(target.model, target.audit.model, True, target) for target in targets]
    chosen: list[_Choice] = []
    for word in overrides.models or (SMOLLM2,):
        given = given_model(word)
        lines = [target for target in targets if target.model == given.known]
        if given.known is not None and not lines:
            have = ", ".join(dict.fromkeys(target.model for target in targets))
            raise InputError(f"`models` has {word!r}, but this table has no {given.known}; it has {have}.")
        if given.known is not None:
            chosen += [_Choice(given.known, given.folder or line.audit.model, True, line) for line in lines]
            continue
        # Another model stands beside one line per corpus, at the largest count of the table.
        for corpus in dict.fromkeys(target.corpus for target in targets):
            here = [target for target in targets if target.corpus == corpus]
            line = next((target for target in here if target.model == beside), here[0])
            count = max(target.audit.blocks or 0 for target in here)
            largest = replace(line, audit=replace(line.audit, blocks=count))
            chosen.append(_Choice(given.printed, word, False, largest))
    return chosen


def _audited(choice: _Choice, profile: Profile, overrides: Overrides) -> AuditedModel:
    target = choice.target
    audit = replace(target.audit if profile == "paper" else SMALL[profile], model=choice.source)
    if overrides.texts:
        audit = replace(audit, texts=overrides.texts, corpus=None)
    if overrides.blocks is not None:
        audit = replace(audit, blocks=overrides.blocks or None)
    if overrides.block_size is not None:
        audit = replace(audit, block_size=overrides.block_size)
    sources = _sources(audit, overrides)
    same_text = {text.corpus for text in sources} == {target.corpus}
    deviations = []
    if not choice.of_the_paper:
        deviations.append(f"the model is {choice.printed}, not the paper's")
    if not same_text:
        deviations.append(f"the text is {' + '.join(text.title for text in sources)}, not {target.corpus}")
    if (audit.blocks, audit.block_size) != (target.audit.blocks, target.audit.block_size):
        counts = f"{audit.blocks or 'all'} blocks of {audit.block_size}"
        deviations.append(f"{counts}, not {target.audit.blocks} of {target.audit.block_size}")
    if audit.svd != target.audit.svd:
        deviations.append(f"the spectrum is {audit.svd}, not {target.audit.svd}")
    corpus = target.corpus if same_text else " + ".join(text.corpus or text.name for text in sources)
    return AuditedModel(choice.printed, corpus, target.model, target.corpus, audit, tuple(deviations))


def _sources(audit: AuditConfig, overrides: Overrides) -> tuple[TextSource, ...]:
    return text_sources(audit.texts, audit.corpus, overrides.text_source)
