"""What is kept of one optimizer step: plain numbers, one line of steps.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class AdamSample:
    """The state after a sampled step; `param_norm` is ‖θ‖₂ after it as well."""

    v_inf: float
    d_norm: float
    d_inf: float
    corrected_d_norm: float
    corrected_d_inf: float
    param_norm: float


@dataclass(frozen=True)
class StepRecord:
    """One step; norms are over all parameters as one vector."""

    step: int
    loss: float
    """L_s: sum of the contributions of the micro-batches, CE and auxiliary."""
    cross_entropy: float
    auxiliary: float
    grad_norm: float
    """‖g‖₂ before clipping."""
    grad_inf: float
    param_norm: float
    """‖θ‖₂ before the step, where g was taken."""
    postclip_norm: float
    postclip_inf: float
    micro_batches: int = 1
    micro_nan: int = 0
    micro_inf: int = 0
    gradient: str = "finite"
    """"finite", "nan" (a NaN, infinities beside it or not) or "inf"."""
    updated: bool = True
    """False where the update was left out because its gradient was not finite."""
    lr: float | None = None
    seconds: float | None = None
    telemetry: dict[str, float | None] = field(default_factory=dict)
    adam: AdamSample | None = None

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null, and `gradient` and the counts say why."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The inverse of `to_json`: null numbers come back as NaN."""
        data: dict[str, Any] = json.loads(line)
        values: dict[str, Any] = {
            f.name: math.nan if data[f.name] is None and f.type == "float" else data[f.name]
            for f in fields(cls)
            if f.name in data
        }
        adam = values.pop("adam", None)
        if adam is not None:
            adam = AdamSample(**{name: math.nan if value is None else value for name, value in adam.items()})
        return cls(**values, adam=adam)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
