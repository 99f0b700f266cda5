"""What to do about Z-loss on one model: `recommendation.json`, and `plan.json` with the arms and their expected cost.

The plan is written once, before the first run, and read again when an interrupted command resumes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from zloss.results.comparison import Verdict, VerdictName, method_label
from zloss.results.decision import ActionVerdict, Decision
from zloss.results.provenance import Provenance
from zloss.results.record import ResultRecord, written_with

PLAN_FILE = "plan.json"


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
class RecommendPlan(ResultRecord):
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
    """What all runs share, for your own trainer: learning rate, schedule, batch, clipping, precision, blocks."""
    request: str = ""
    """Budget, steps and seeds as requested; another request on the same runs makes another plan."""
    checkpoint_every: int = 100
    """Steps between two checkpoints of a run."""
    budget_seconds: float | None = None
    """The stated budget; None without one."""
    seconds: float | None = None
    """Expected time of the whole command; None if no step was timed."""
    step_seconds: float | None = None
    """Measured time of one optimizer step."""
    run_seconds: float | None = None
    """Expected time of a run besides its steps: its start, validation and checkpoints."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""


Level = Literal["confirmed here", "direction only", "undecided"]
ArmState = Literal["passed", "not passed", "stopped", "left out"]
PASSES = "passes selection"
"""Reason of an arm that passed."""
NOT_TESTED = "longer training and other scales were not tested"


@dataclass(frozen=True)
class ArmResult:
    """One candidate, with its results on the first seed and the selecting half of the validation text."""

    method: str
    """Name of the objective."""
    coef: float
    """λ; 0 without a penalty."""
    state: ArmState
    """What selection says: "stopped" ended early, because its rejection was certain; "left out" had no run."""
    stages: tuple[str, ...]
    """Fired stages that proposed it."""
    reason: str
    """Why it has this state, in one sentence."""
    note: str = ""
    """How λ was chosen."""
    delta_ce: float | None = None
    """CE minus that of the CE run, in nats per token; None without a finished run."""
    ratio: float | None = None
    """The quantity that the method is meant to lower, over its reference; the larger ratio if there are two quantities."""
    transported: float | None = None
    """p99 ‖δ_u‖ as deployed, over that of CE on raw logits, both at λ_diag: what arms are ranked by."""
    steps: int | None = None
    """Steps that were run."""
    confirmed: VerdictName | None = None
    """Its verdict on the fresh seeds and the other half of the text; None for an arm that was not carried to confirmation."""

    @property
    def label(self) -> str:
        """Name and coefficient."""
        return method_label(self.method, self.coef)


@dataclass(frozen=True)
class Paste:
    """Lines for one training stack."""

    where: str
    """The stack."""
    lines: str
    """What to paste; empty if nothing can be set."""
    note: str = ""
    """The denominator, or what cannot be expressed there."""
    exact: bool = True
    """Whether the lines are this recipe; False for the nearest setting."""


@dataclass(frozen=True)
class Tested:
    """What the answer is based on."""

    model: str
    """The checkpoint."""
    text: str
    """The training text."""
    lr: float | None
    """Peak learning rate; None if an external trainer did not record it."""
    steps: int | None
    """Optimizer steps of every run."""
    tokens: int | None
    """Training tokens of every run."""
    known: tuple[str, ...] = ()
    """Settings that were taken from the checkpoint, in words, each with its file."""
    assumed: tuple[str, ...] = ()
    """Settings that neither the user nor the checkpoint states, in words."""


@dataclass(frozen=True)
class Recommendation(ResultRecord):
    """The answer, its reasons, its cost, and what it does not promise."""

    SCHEMA: ClassVar[str] = "zloss.recommendation/1"
    FILE: ClassVar[str] = "recommendation.json"

    action: str
    """What to do: the sentence of `verdict`."""
    objective: str | None
    """Name of the objective that the runs point to (ce: no Z-loss); None if nothing is decided."""
    coef: float | None
    """Its λ; 0 without a penalty; None if nothing is decided."""
    level: Level
    """How sure: "undecided" means that you keep what you have."""
    confidence: str
    """How many fresh seeds and steps the answer is based on, what was assumed, and what was not tested."""
    why: tuple[str, ...]
    """Reasons, the deciding one first; numbers are those of the confirmation."""
    cost: tuple[str, ...]
    """What it costs."""
    not_guaranteed: tuple[str, ...]
    """What it does not promise."""
    stages: tuple[Decision, ...]
    """All eight stages of the decision map."""
    paste: tuple[Paste, ...]
    """Lines for a plain loop, transformers, and the settings of other frameworks."""
    tested: Tested
    """What it is based on."""
    arms: tuple[ArmResult, ...]
    """The candidates and what selection said of them."""
    confirmation: tuple[Verdict, ...]
    """Verdicts of the arms with `confirmed`, on the confirming seeds and the confirming half of the validation text."""
    selection_seed: int | None
    """Seed that selected; None without runs."""
    confirmation_seeds: tuple[int, ...]
    """Seeds that confirmed."""
    tolerance_ppl: float | None
    """How much PPL may rise."""
    budget_seconds: float | None
    """The stated budget; None without one."""
    seconds: float
    """Total time in seconds, without interruptions."""
    notes: tuple[str, ...]
    """Caveats: where the runs come from, seeds that did not fit the budget, too few seeds."""
    provenance: Provenance
    """What made it."""
    verdict: ActionVerdict | None = field(default=None, metadata=written_with("verdict"))
    """What to do; None in older files."""
    added_seeds: tuple[int, ...] | None = field(default=None, metadata=written_with("added_seeds"))
    """Confirming seeds that were added after an earlier answer of the same folder; absent without any."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The record of a parsed file; states of arms from before 0.3 are converted to the current ones."""
        # A file too damaged for that raises an error that names the key.
        with suppress(TypeError, KeyError):
            data = _with_current_states(data)
        return super().from_dict(data)


def _with_current_states(data: dict[str, Any]) -> dict[str, Any]:
    """Before 0.3 the arm that went on to confirmation was "chosen", whether it had passed or not, and others "failed"."""
    if not any(arm["state"] in ("chosen", "failed") for arm in data["arms"]):
        return data
    arms, confirmation = [], []
    for arm in data["arms"]:
        if arm["state"] in ("chosen", "passed", "failed"):
            key = arm["method"], arm["coef"]
            carried = arm["state"] == "chosen" or key == (data["objective"], data["coef"])
            verdicts = [one for one in data["confirmation"] if carried and (one["method"], one["coef"]) == key]
            passed = arm["state"] == "passed" or arm["reason"] == PASSES
            confirmation += verdicts
            arm = arm | {
                "state": "passed" if passed else "not passed",
                "confirmed": verdicts[0]["verdict"] if verdicts else None,
            }
        arms.append(arm)
    return data | {"arms": arms, "confirmation": confirmation}
