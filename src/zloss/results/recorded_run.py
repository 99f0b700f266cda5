"""config.json of a run that another loop made and zloss recorded, schema "zloss.recorded-run/1".

Two runs are a matched pair where everything here agrees but the method with its numbers; initial weights have to agree
between runs of one seed only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from zloss.results.record import from_plain, to_plain
from zloss.results.run_config import TextPart
from zloss.results.schema import without_schema
from zloss.results.train_config import run_name

FREE_RECORDED = ("objective", "initial_weights")
"""Keys beyond `FREE` in which the recorded runs of one experiment may differ."""


@dataclass(frozen=True)
class RecordedData:
    """Both texts of a recorded run."""

    valid: TextPart
    """The blocks on which the trained model is measured."""
    train: dict[str, Any] | None = None
    """What the loop says of its training data; None where it says nothing."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One config.json."""

    SCHEMA: ClassVar[str] = "zloss.recorded-run/1"

    loop: str
    """What trained: the class of the trainer, or "plain loop"."""
    model: str
    """Class of the model."""
    method: str
    """Name of the objective, as on the command line."""
    coef: float
    """λ of the method; 0 without a penalty. Factorized: λ_rel."""
    target: float | None
    """Target of the log-normalizer; None is log V."""
    gain_beta: float
    """β of the gain-aware weight, for the method and for what is measured of every run."""
    objective: dict[str, Any]
    """Every number of the objective."""
    seed: int
    """Seed by which runs are paired."""
    clip: float | None
    """Threshold of the gradient norm; None where nothing is clipped."""
    settings: dict[str, Any]
    """Settings of the loop that define the experiment: learning rate, schedule, batch, precision, …"""
    measured: dict[str, Any]
    """Settings of the measurement: samples of Adam's state, blocks of the gradient section, λ_diag."""
    data: RecordedData
    """Both texts."""
    initial_weights: str
    """Checksum of all weights before the first step."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version of this file."""

    @property
    def name(self) -> str:
        """The folder of the run: method, coefficient, seed, as of `zloss train`."""
        return run_name(self.method, self.coef, self.seed)

    def to_dict(self) -> dict[str, Any]:
        """The file as plain JSON values."""
        return {"schema": self.SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> RecordedRun:
        """The inverse of `to_dict`; a missing or ill-typed key is named."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))
