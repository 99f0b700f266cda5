"""Decisions about results: the stages of the decision map, and `decisions.json` with schema "zloss.decisions/1"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from zloss.results.record import ResultRecord, written_with

Action = Literal["nothing", "center", "train", "fix_implementation", "not_enough_evidence"]
"""What a verdict asks for, the least first."""


@dataclass(frozen=True)
class Effect:
    """What an action would change, measured on this text: `before` → `after`."""

    quantity: str
    """Name or symbol of the quantity."""
    before: float | None
    """Its value now."""
    after: float | None
    """Its value under the action."""
    unit: str = ""
    """Unit; "λ" for a coefficient."""
    note: str = ""
    """How the value was obtained."""

    @property
    def ratio(self) -> float | None:
        """after / before, where both exist and before ≠ 0."""
        return None if self.before in (None, 0) or self.after is None else self.after / float(self.before or 1)


@dataclass(frozen=True)
class Consequence:
    """What a stage means for the training run the user is planning: a stage may fire and still be harmless."""

    quantity: str
    """The measured consequence, in words."""
    value: float | None
    """Its value; None if it could not be measured."""
    limit: float | None
    """The value from which it matters."""
    unit: str
    """Unit of both; empty for a ratio."""
    matters: bool | None
    """Whether the consequence is worth acting on; None if it could not be computed."""
    reason: str
    """Why, in one sentence."""


@dataclass(frozen=True)
class ActionVerdict:
    """The answer to "what should I do about Z-loss?": computed once, shown on the terminal, on the page and in JSON."""

    action: Action
    """What to do."""
    sentence: str
    """The answer in one plain sentence."""
    why: tuple[str, ...]
    """The reasons with their numbers, the deciding one first."""
    confidence: str
    """How sure: what was measured, and what was assumed."""
    changes: tuple[str, ...] = ()
    """What the action would change, and what it would not."""
    if_trained: tuple[str, ...] | None = field(default=None, metadata=written_with("if_trained"))
    """Those of the reasons that say what a Z-loss would do to this model, the limit of λ first; None without any."""


@dataclass(frozen=True)
class Decision:
    """One stage of the decision map."""

    stage: str
    """Name of the stage."""
    risk: str
    """What can go wrong there."""
    trigger: str
    """The measured quantity that shows it."""
    value: float | None
    """Its value."""
    threshold: float | None
    """The value above which the stage fires."""
    fired: bool | None
    """Whether it does; None if the stage was not evaluated."""
    reason: str
    """The verdict in one sentence; for a stage that was not evaluated, the command that would evaluate it."""
    action: str
    """What to do where it fires."""
    expected: str
    """What the action achieves."""
    not_guaranteed: str
    """What it may not achieve."""
    evidence: str
    """Where the paper shows it."""
    threshold_name: str = ""
    """Name of the threshold among `thresholds`."""
    measured: tuple[Effect, ...] = ()
    """For a fired stage: what the action would change on this text."""
    consequence: Consequence | None = field(default=None, metadata=written_with("consequence"))
    """What the stage means for the planned training; None in older files."""


@dataclass(frozen=True)
class LambdaBudget:
    """λ at which R_Z meets `r_z`: R_Z is linear in λ, so λ = coef · r_z / R_Z(coef)."""

    r_z: float
    """The stated budget."""
    raw: float | None = None
    """λ on raw logits, gradient of the head."""
    centered: float | None = None
    """λ on row-centered logits, gradient of the head."""
    whole_model: float | None = None
    """λ on raw logits, gradient of all parameters."""


@dataclass(frozen=True)
class DecisionMap:
    """The eight stages, evaluated from one audit and the results joined to it."""

    audit: str | None
    """Name of the audit; None for a map without one."""
    thresholds: dict[str, float | None]
    """The thresholds by name."""
    decisions: tuple[Decision, ...]
    """The stages in the order source → transport → optimizer → quality."""
    bottom_line: str | None = field(default=None, metadata=written_with("bottom_line"))
    """Where to begin, in one sentence; None in older files."""
    order: tuple[str, ...] | None = field(default=None, metadata=written_with("order"))
    """Names of the fired stages in the order in which to act on them."""
    models: str | None = field(default=None, metadata=written_with("models"))
    """Which model each result is for, in one sentence; absent if all name the same one."""
    verdict: ActionVerdict | None = field(default=None, metadata=written_with("verdict"))
    """What to do; None in older files."""


@dataclass(frozen=True)
class DecisionMaps(ResultRecord):
    """The maps of joined results."""

    SCHEMA: ClassVar[str] = "zloss.decisions/1"

    results: tuple[str, ...]
    """The joined files, each by the last two parts of its path."""
    maps: tuple[DecisionMap, ...]
    """One per audit, or one alone if no audit was given."""
