"""`drift.json` with schema "zloss.drift/1": checkpoints of one run on the same text, and what moved while CE did not.

Next to it, `checkpoints/NAME/kept.json` with schema "zloss.drift-checkpoint/1": one finished checkpoint, which is reused as
long as its weights, the text and the settings are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from zloss.errors import InputError
from zloss.results.options import Coordinate
from zloss.results.provenance import Provenance
from zloss.results.record import ResultRecord, within
from zloss.results.run_metrics import ValidationBlocks

KEPT_FILE = "kept.json"
MovementState = Literal["invisible", "with_ce", "quiet", "open"]
"""Moved while CE did not move; moved only where CE moved too; did not move; not evaluated."""


@dataclass(frozen=True)
class DriftNumbers:
    """The watched numbers of one checkpoint in one coordinate; quantiles are over tokens."""

    mu_abs_99: float | None = None
    """p99 of |μ|; centered: the measured fp32 residual."""
    mu_rms: float | None = None
    """√(E μ²), in nats."""
    p_z_999: float | None = None
    """p99.9 of |log Z − c|."""
    a_p_99: float | None = None
    """p99 of the output-to-hidden gain A_p."""
    sigma_1: float | None = None
    """Largest singular value of the head."""
    e_1: float | None = None
    """Share of ‖W‖_F² in the first singular direction."""
    r_z: float | None = None
    """‖g_Z‖/‖g_CE‖ at the head, on the diagnostic batch."""


@dataclass(frozen=True)
class DriftCheckpoint:
    """One checkpoint of the run."""

    name: str
    """Name of its folder, or its revision on the hub."""
    step: int
    """The step that its name states."""
    weights: str
    """Checksum of its weights and config."""
    vocab: int = field(metadata=within(1))
    """V: rows of the head."""
    width: int
    """D: width of the hidden state."""
    ce: float | None
    """Mean cross-entropy on the text, in nats per token."""
    ppl: float | None
    """Perplexity on the text."""
    raw: DriftNumbers
    """Logits as the head gives them."""
    centered: DriftNumbers
    """Row-centered logits; all None if μ does not exist."""


@dataclass(frozen=True)
class CeChange:
    """Cross-entropy of one checkpoint minus that of an earlier one, block by block on the same text."""

    from_step: int
    """Step of the earlier checkpoint."""
    to_step: int
    """Step of the later checkpoint."""
    difference: float | None
    """Mean difference in nats per token; None if a CE is not finite."""
    half_width: float | None
    """Half the width of its 95 % interval over groups of blocks."""
    still: bool
    """Whether the whole interval lies within the tolerance: CE did not move."""


@dataclass(frozen=True)
class Movement:
    """What one number of one coordinate did over the run."""

    quantity: str
    """Key of the number in `raw` and `centered`."""
    coordinate: Coordinate
    """The coordinate it was measured in."""
    state: MovementState
    """ "invisible" is drift that CE cannot see."""
    reason: str
    """One sentence."""
    from_step: int | None = None
    """Step at which the largest movement starts; None if nothing moved."""
    to_step: int | None = None
    """Step at which it ends."""
    before: float | None = None
    """The number at `from_step`."""
    after: float | None = None
    """The number at `to_step`."""
    last_before: int | None = None
    """Last step at which the number had not yet moved from `before`."""
    began: int | None = None
    """Step of the first checkpoint at which the movement is seen; it began between `last_before` and this step."""
    noise: float | None = None
    """Half the width of the 95 % interval of the change over the text; None if the number does not depend on tokens."""
    level: float | None = None
    """Quantile at which the change was tested: the highest with 50 tokens beyond it; None if it is not a quantile."""
    ce_change: CeChange | None = None
    """What CE did between the two steps."""


@dataclass(frozen=True)
class DriftFinding:
    """A movement in short: what moved, where it is first seen, and whether CE shows it."""

    quantity: str
    """Key of the number in `raw` and `centered`."""
    coordinate: Coordinate
    """The coordinate it was measured in."""
    began: int | None
    """Step of the first checkpoint at which the movement is seen."""
    ce_invisible: bool
    """True where it moved while CE did not move."""


@dataclass(frozen=True)
class Drift(ResultRecord):
    """Checkpoints of one run in the order of their steps, and the verdict on every watched number."""

    SCHEMA: ClassVar[str] = "zloss.drift/1"
    FILE: ClassVar[str] = "drift.json"

    model: str
    """The run: the hub id, or the name of the folder that holds the checkpoints."""
    corpus: str
    """The text."""
    blocks: int
    """Blocks of the text."""
    block_size: int
    """Predictions per block."""
    checkpoints: tuple[DriftCheckpoint, ...]
    """In the order of their steps."""
    ce_changes: tuple[CeChange, ...]
    """CE between neighboring checkpoints."""
    movements: tuple[Movement, ...]
    """One per watched number and coordinate."""
    finding: str
    """What matters, in a few sentences."""
    began: int | None
    """Step of the first checkpoint at which the drift that CE cannot see is seen; None without one."""
    limits: dict[str, float]
    """The limits that the verdict used, by name."""
    provenance: Provenance
    """What made it."""
    notes: tuple[str, ...] = ()
    """Notes on how the text was split into blocks."""
    findings: tuple[DriftFinding, ...] = ()
    """The movements that took place, in short; follows from `movements`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    def __post_init__(self) -> None:
        if not self.checkpoints or len(self.ce_changes) != len(self.checkpoints) - 1:
            raise InputError(
                f"`ce_changes` is expected to have one entry between two `checkpoints`, but there are {len(self.ce_changes)} "
                f"and {len(self.checkpoints)}."
            )
        found = tuple(
            DriftFinding(each.quantity, each.coordinate, each.began, each.state == "invisible")
            for each in self.movements
            if each.state in ("invisible", "with_ce")
        )
        object.__setattr__(self, "findings", found)

    @property
    def invisible(self) -> tuple[Movement, ...]:
        """The movements that CE cannot see."""
        return tuple(movement for movement in self.movements if movement.state == "invisible")


@dataclass(frozen=True)
class KeptCheckpoint(ResultRecord):
    """A finished checkpoint with what the verdict needs from its text."""

    SCHEMA: ClassVar[str] = "zloss.drift-checkpoint/1"

    identity: str
    """Checksum of weights, config, tokens and settings, and the version of zloss."""
    tokens: str
    """Checksum of the tokens of the text and of their blocks."""
    corpus: str
    """The text."""
    checkpoint: DriftCheckpoint
    """Its numbers."""
    blocks: ValidationBlocks
    """CE and tails block by block."""
    notes: tuple[str, ...] = ()
    """Notes on how the text was split into blocks."""
