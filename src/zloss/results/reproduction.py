"""The reproduction of one table, figure or passage of the paper: LABEL.json, schema "zloss.reproduction/1".

It holds what was measured, the paper's numbers next to it and the verdict on every claim, without the code of its recipe.
Which quantity a column is, and its unit, is the paper's: columns have the keys of the paper's tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zloss.results.provenance import ReproductionProvenance
from zloss.results.record import ResultRecord

Profile = Literal["paper", "cpu", "smoke"]
"""Scale of a reproduction: the paper's, two cores, or seconds."""
PROFILES: dict[Profile, str] = {
    "paper": "the paper's models, corpora, counts and seeds",
    "cpu": "two cores, offline: audits on SmolLM2-135M in minutes, training on a separate small model",
    "smoke": "seconds: whether it runs at all",
}
Verdict = Literal["holds", "does not hold", "cannot be tested here"]
NOT_JUDGED = "not checked at smoke size"


@dataclass(frozen=True, kw_only=True)
class ReproducedLine:
    """One line of the reproduced table, next to the paper's."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Key of the line (model, head, method, ...) and its numbers, by column; a number that does not exist is absent."""
    reasons: dict[str, str]
    """Why a number does not exist, by column."""
    deviations: tuple[str, ...]
    """What keeps the numbers from being comparable with the paper's, one sentence each; empty at the paper's setting."""
    beside: dict[str, Any] | None
    """Key and numbers of the paper's line that this one is compared with; None if the paper has none."""
    ratio: dict[str, float | None]
    """Ours divided by the paper's, by column, where both exist and the paper's is not 0."""
    printed: dict[str, str] = field(default_factory=dict)
    """The paper's numbers as it prints them, zeros at the end included, by column."""

    def numbers(self, columns: tuple[str, ...]) -> dict[str, float]:
        """The numbers of the line among `columns`."""
        return {column: self.extra[column] for column in columns if column in self.extra}

    def key(self, columns: tuple[str, ...]) -> dict[str, Any]:
        """What the line is about: every entry that is not one of the number `columns`."""
        return {name: value for name, value in self.extra.items() if name not in columns}


@dataclass(frozen=True, kw_only=True)
class PaperVerdict:
    """A claim, checked on the paper's own numbers."""

    verdict: Verdict
    """Whether it holds on them."""
    evidence: str
    """The numbers the verdict is based on."""


@dataclass(frozen=True, kw_only=True)
class ReproducedClaim:
    """One statement of the paper, checked on our numbers."""

    id: str
    """Name of the claim within its label."""
    statement: str
    """The paper's statement, in our words."""
    verdict: Verdict
    """Whether it holds on our numbers."""
    evidence: str
    """The numbers the verdict is based on."""
    reading: str
    """Our part of the check: thresholds and tolerances that the paper does not state."""
    on_the_papers_numbers: PaperVerdict | None
    """The same check on the paper's numbers; None if the paper has no table."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting that the paper does not state."""

    setting: str
    """Its name."""
    ours: str
    """Our choice."""


@dataclass(frozen=True)
class TextSource:
    """A text, where to get it, and its licence."""

    name: str
    """File name, or name of a corpus."""
    title: str
    """What the text is."""
    source: str
    """Where anyone can get it."""
    licence: str
    """Licence of the text."""
    sha256: str | None = None
    """Checksum of its bytes; None for a corpus that is streamed."""
    corpus: str | None = None
    """The paper's corpus that it is, if it is one."""


@dataclass(frozen=True, kw_only=True)
class ReproductionRecord(ResultRecord):
    """The result of one recipe."""

    SCHEMA: ClassVar[str] = "zloss.reproduction/1"

    label: str
    """Label of the table or figure in the paper, or `text:...` of a passage."""
    title: str
    """What it shows."""
    profile: Profile
    """Scale of this reproduction."""
    comparable: bool
    """Whether every line was measured at the paper's setting."""
    columns: tuple[str, ...]
    """Columns that hold numbers, in the order they are printed."""
    rows: tuple[ReproducedLine, ...]
    """Our lines."""
    paper_rows: tuple[dict[str, Any], ...]
    """The paper's lines: key and numbers by column; empty if it has no table."""
    claims: tuple[ReproducedClaim, ...]
    """The paper's statements about the table."""
    not_stated_by_the_paper: tuple[Choice, ...]
    """Settings that the paper leaves open, with our choice."""
    notes: tuple[str, ...]
    """Caveats, one sentence each."""
    config: dict[str, Any]
    """The complete setting, as its recipe defines it; files by name."""
    texts: tuple[TextSource, ...]
    """The texts that were read."""
    details: dict[str, Any]
    """Further results, as the recipe defines them."""
    provenance: ReproductionProvenance
    """What made it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version of this file."""

    @property
    def judged(self) -> bool:
        """Whether the claims were checked: the few tokens and steps of the smoke profile decide none."""
        return self.profile != "smoke"
