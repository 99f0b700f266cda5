"""`plan.json` with schema "zloss.recommend-plan/1": the arms of a recommendation and what they are expected to cost.

It is written once, before the first run, and read again by a command that goes on after an interruption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from zloss.results.method_label import method_label
from zloss.results.record import from_plain, to_plain
from zloss.results.schema import without_schema

FILE = "plan.json"


@dataclass(frozen=True)
class Arm:
    """One method at one coefficient."""

    method: str
    """Name of the objective, as in `zloss train`."""
    coef: float
    """λ; 0 without a penalty."""
    stages: tuple[str, ...] = ()
    """Stages of the decision map that proposed it; empty for CE and for a reference."""
    note: str = ""
    """How λ was chosen, or why the arm is there without a stage."""
    code: str = ""
    """The objective as a Python expression."""

    @property
    def label(self) -> str:
        """Name and coefficient."""
        return method_label(self.method, self.coef)

    @property
    def key(self) -> tuple[str, float]:
        """Method and coefficient, as runs are grouped."""
        return self.method, self.coef


@dataclass(frozen=True)
class LeftOut:
    """An arm that the budget has no room for."""

    method: str
    """Name of the objective."""
    coef: float
    """Its λ."""
    reason: str
    """Why it was left out."""


@dataclass(frozen=True)
class RecommendPlan:
    """Arms, seeds, steps and time."""

    SCHEMA: ClassVar[str] = "zloss.recommend-plan/1"

    identity: str
    """Checksum of the settings, the tokens and the weights; a plan of other ones is not used."""
    model: str
    """The checkpoint, as it was named."""
    text: str
    """The training text."""
    arms: tuple[Arm, ...]
    """Arms of the first seed in the order of their runs, CE first."""
    left_out: tuple[LeftOut, ...]
    """Candidates without a run."""
    seeds: tuple[int, ...]
    """The first one selects, the others confirm."""
    steps: int
    """Optimizer steps of every run."""
    settings: dict[str, Any]
    """What all runs share, for a trainer of one's own: learning rate, schedule, batch, clipping, precision, blocks."""
    request: str = ""
    """Budget, steps and seeds as they were asked for; another request on the same runs makes another plan."""
    checkpoint_every: int = 100
    """Steps between two checkpoints of a run."""
    budget_seconds: float | None = None
    """The stated budget; None without one."""
    seconds: float | None = None
    """Expected time of the whole command; None where no step was timed."""
    step_seconds: float | None = None
    """Measured time of one optimizer step."""
    run_seconds: float | None = None
    """Expected time of a run beside its steps: its start, validation and checkpoints."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": self.SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> RecommendPlan:
        """The plan of a parsed plan.json."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))
