"""One optimizer step as plain numbers: one line of steps.jsonl.

Norms are over all trained parameters as one vector. A number that is not finite is null in the file and NaN when read back;
`gradient`, `micro_nan` and `micro_inf` say what it was.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from zloss.errors import InputError
from zloss.results.reading import parse_json
from zloss.results.record import NATS, NOT_NEGATIVE, Range, check_range, range_of, within

GradientState = Literal["finite", "nan", "inf"]
"""What the entries of a gradient are: all finite, or one is NaN, or one is infinite and none is NaN."""


@dataclass(frozen=True)
class AdamSample:
    """Adam's state after a sampled step; d = m/(√v + ε) is its direction before learning rate and weight decay."""

    v_inf: float = field(metadata=NOT_NEGATIVE)
    """‖v‖∞ of the second moment."""
    d_norm: float = field(metadata=NOT_NEGATIVE)
    """‖d‖₂."""
    d_inf: float = field(metadata=NOT_NEGATIVE)
    """‖d‖∞."""
    corrected_d_norm: float = field(metadata=NOT_NEGATIVE)
    """‖d‖₂ of the bias-corrected direction."""
    corrected_d_inf: float = field(metadata=NOT_NEGATIVE)
    """‖d‖∞ of the bias-corrected direction."""
    param_norm: float = field(metadata=NOT_NEGATIVE)
    """‖θ‖₂ after the step."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int = field(metadata=within(1))
    """Its number, from 1."""
    loss: float
    """L_s in nats per token: sum of the contributions of the micro-batches, CE and auxiliary."""
    cross_entropy: float = field(metadata=NATS)
    """CE part of the loss, in nats per token."""
    auxiliary: float
    """Auxiliary part of the loss, its coefficient included."""
    grad_norm: float = field(metadata=NOT_NEGATIVE)
    """‖g‖₂ before clipping."""
    grad_inf: float = field(metadata=NOT_NEGATIVE)
    """‖g‖∞ before clipping."""
    param_norm: float = field(metadata=NOT_NEGATIVE)
    """‖θ‖₂ before the step, where g was taken."""
    postclip_norm: float = field(metadata=NOT_NEGATIVE)
    """‖g‖₂ after clipping."""
    postclip_inf: float = field(metadata=NOT_NEGATIVE)
    """‖g‖∞ after clipping."""
    micro_batches: int = field(default=1, metadata=within(1))
    """Micro-batches of the step."""
    micro_nan: int = field(default=0, metadata=NOT_NEGATIVE)
    """Micro-batches whose loss is NaN."""
    micro_inf: int = field(default=0, metadata=NOT_NEGATIVE)
    """Micro-batches whose loss is infinite."""
    gradient: GradientState = "finite"
    """Whether the gradient before clipping was finite."""
    updated: bool = True
    """False where the update was left out because its gradient was not finite."""
    lr: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Learning rate of the step; None where the loop did not say it."""
    seconds: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Wall-clock time of the step, in seconds; None where the loop did not say it."""
    telemetry: dict[str, float | None] = field(default_factory=dict)
    """Further numbers by key, from the tokens of the step: tails of the head, numbers of the routers."""
    adam: AdamSample | None = None
    """Adam's state; None at a step where it was not sampled."""

    def to_json(self) -> str:
        """One line of strict JSON; a number that is not finite becomes null."""
        return json.dumps(_null_nonfinite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The inverse of `to_json`; a key that is missing, ill-typed or out of its range is named."""
        try:
            data = parse_json(line)
        except ValueError as error:
            raise InputError(f"it is not JSON ({error}).") from error
        values = _checked(data, _STEP_KEYS, _STEP_RANGES, "")
        adam = values["adam"]
        values["adam"] = None if adam is None else AdamSample(**_checked(adam, _ADAM_KEYS, _ADAM_RANGES, "adam."))
        values["telemetry"] = {
            key: _value(number, "float | None", f"telemetry.{key}") for key, number in values["telemetry"].items()
        }
        bad, micro_batches = values["micro_nan"] + values["micro_inf"], values["micro_batches"]
        if bad > micro_batches:
            raise InputError(
                f"`micro_nan` + `micro_inf` is expected to be at most `micro_batches`, which is {micro_batches}, but is {bad}."
            )
        return cls(**values)


# Files have thousands of lines, each read several times: the types are looked up once.
_STEP_KEYS = {entry.name: str(entry.type) for entry in fields(StepRecord)}
_ADAM_KEYS = {entry.name: str(entry.type) for entry in fields(AdamSample)}
_STEP_RANGES = {entry.name: bounds for entry in fields(StepRecord) if (bounds := range_of(entry)) is not None}
_ADAM_RANGES = {entry.name: bounds for entry in fields(AdamSample) if (bounds := range_of(entry)) is not None}
_PLAIN_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float, type(None)), "a number or null"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "GradientState": ((str,), f"one of {list(get_args(GradientState))}"),
    "bool": ((bool,), "true or false"),
    "dict[str, float | None]": ((dict,), "an object"),
    "AdamSample | None": ((dict, type(None)), "an object or null"),
}
"""Type of a field → types of its JSON value, and their name."""


def _checked(data: Any, keys: dict[str, str], ranges: dict[str, Range], path: str) -> dict[str, Any]:
    """The values of all `keys`; keys beyond them are left aside."""
    if not isinstance(data, dict):
        raise InputError(f"`{path.rstrip('.') or 'the line'}` is expected to be an object, but is {str(data)[:80]!r}.")
    for name in keys:
        if name not in data:
            raise InputError(f"`{path}{name}` is missing.")
    values = {name: _value(data[name], kind, f"{path}{name}") for name, kind in keys.items()}
    for name, bounds in ranges.items():
        check_range(bounds, values[name], f"{path}{name}")
    return values


def _value(value: Any, kind: str, path: str) -> Any:
    types, expected = _PLAIN_TYPES[kind]
    fits = isinstance(value, types) and (kind == "bool" or not isinstance(value, bool))
    if not fits or (kind == "GradientState" and value not in get_args(GradientState)):
        raise InputError(f"`{path}` is expected to be {expected}, but is {str(value)[:80]!r}.")
    return math.nan if value is None and kind == "float" else value


def _null_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_nonfinite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
