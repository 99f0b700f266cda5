"""From a table of audited models to one typed audit per line, at every profile.

At paper scale the paper's own counts; otherwise one small setting that all audit recipes share, so that one audit
serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zloss.audit.checkpoint.config import AuditConfig
from zloss.errors import InputError
from zloss.results.choices import SMOLLM2
from zloss_paper.engine.profile import Overrides, Profile
from zloss_paper.engine.texts import CORPUS_NAMES, TextSource, text_sources

MODEL_IDS = {
    "DistilGPT-2": "distilgpt2",
    "GPT-2": "gpt2",
    "GPT-2 Medium": "gpt2-medium",
    "GPT-2 Large": "gpt2-large",
    "Pythia-160M": "EleutherAI/pythia-160m-deduped",
    "Pythia-410M": "EleutherAI/pythia-410m-deduped",
    "Pythia-1B": "EleutherAI/pythia-1b-deduped",
}
"""The paper's names and the checkpoints; it states the ids of the Pythia models only."""
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
class AuditRow:
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
    """The complete setting of a recipe that reads audits."""

    label: str
    profile: Profile
    rows: tuple[AuditRow, ...]
    texts: tuple[TextSource, ...]
    deployed: bool = False
    """Also measure the perplexity of the centered logits as deployed."""


def paper_target(model: str, corpus: str, blocks: int, **settings: object) -> Target:
    """A line at the paper's scale: fp32, the first blocks of the corpus, all rows of the head, λ_diag = 1e-4."""
    base = AuditConfig(model=MODEL_IDS[model], corpus=CORPUS_NAMES[corpus], blocks=blocks, gradient_blocks=0)
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
    rows = [
        _row(target, name, source, named, profile, overrides)
        for name, source, named, target in _chosen(targets, profile, overrides, beside)
    ]
    # One text for two corpora makes two lines of one name: the one nearer to the paper stays.
    unique: dict[tuple[str, str], AuditRow] = {}
    for row in sorted(rows, key=lambda row: len(row.deviations)):
        unique.setdefault((row.model, row.corpus), row)
    kept = tuple(row for row in rows if row in unique.values())
    sources = {text: None for row in kept for text in _sources(row.audit, overrides)}
    return AuditTableConfig(label, profile, kept, tuple(sources), deployed)


def _chosen(
    targets: Sequence[Target], profile: Profile, overrides: Overrides, beside: str
) -> list[tuple[str, str, bool, Target]]:
    """(printed name, where to load it, whether it is the paper's model, line of the paper) for every audit."""
    if not overrides.models and profile == "paper":
        return [(target.model, target.audit.model, True, target) for target in targets]
    chosen: list[tuple[str, str, bool, Target]] = []
    for given in overrides.models or (SMOLLM2,):
        name, equals, folder = given.partition("=")
        known = paper_name(name) if equals else None if Path(given).exists() else paper_name(given)
        lines = [target for target in targets if target.model == known]
        if known is not None and not lines:
            have = ", ".join(dict.fromkeys(target.model for target in targets))
            raise InputError(f"--model {given}: this table has no {known}; it has {have}.")
        if known is not None:
            chosen += [(known, folder or line.audit.model, True, line) for line in lines]
            continue
        # Another model stands beside one line per corpus, at the largest count of the table.
        for corpus in dict.fromkeys(target.corpus for target in targets):
            here = [target for target in targets if target.corpus == corpus]
            line = next((target for target in here if target.model == beside), here[0])
            count = max(target.audit.blocks or 0 for target in here)
            printed = Path(given).name if Path(given).exists() else given
            chosen.append((printed, given, False, replace(line, audit=replace(line.audit, blocks=count))))
    return chosen


def paper_name(name: str) -> str | None:
    """The paper's name of a model given by name or id."""
    for known, identifier in MODEL_IDS.items():
        if name.lower() in (known.lower(), identifier.lower()):
            return known
    return None


def _row(target: Target, name: str, source: str, named: bool, profile: Profile, overrides: Overrides) -> AuditRow:
    base = target.audit if profile == "paper" else SMALL[profile]
    audit = replace(base, model=source)
    if overrides.texts:
        audit = replace(audit, texts=overrides.texts, corpus=None)
    if overrides.blocks is not None:
        audit = replace(audit, blocks=overrides.blocks or None)
    if overrides.block_size is not None:
        audit = replace(audit, block_size=overrides.block_size)
    sources = _sources(audit, overrides)
    corpora = {text.corpus for text in sources}
    same_text = corpora == {target.corpus}
    deviations = []
    if not named:
        deviations.append(f"the model is {name}, not the paper's")
    if not same_text:
        deviations.append(f"the text is {' + '.join(text.title for text in sources)}, not {target.corpus}")
    if (audit.blocks, audit.block_size) != (target.audit.blocks, target.audit.block_size):
        counts = f"{audit.blocks or 'all'} blocks of {audit.block_size}"
        deviations.append(f"{counts}, not {target.audit.blocks} of {target.audit.block_size}")
    if audit.svd != target.audit.svd:
        deviations.append(f"the spectrum is {audit.svd}, not {target.audit.svd}")
    corpus = target.corpus if same_text else " + ".join(text.corpus or text.name for text in sources)
    return AuditRow(name, corpus, target.model, target.corpus, audit, tuple(deviations))


def _sources(audit: AuditConfig, overrides: Overrides) -> tuple[TextSource, ...]:
    return text_sources(audit.texts, audit.corpus, overrides.text_source)
