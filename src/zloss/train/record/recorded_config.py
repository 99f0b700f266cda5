"""config.json of a recorded run, from the objective and what the loop says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from zloss.errors import InputError
from zloss.objectives import Objective
from zloss.optimizer.endpoints import SPIKE, THRESHOLDS
from zloss.results.checks import check_counts, check_numbers

GAIN_BETA = 1e-2
"""β of what is measured where the objective has none."""


@dataclass(frozen=True)
class RecordOptions:
    """What is measured of a recorded run beside its steps and validation blocks."""

    adam_every: int | None = 50
    """Steps between two samples of the Adam state; None takes none."""
    gradient_blocks: int = 8
    """Validation blocks of the gradient section; 0 leaves it out."""
    diag_coef: float = 1e-4
    """λ_diag of Diag Z and of the gradient section."""
    thresholds: tuple[float, ...] = THRESHOLDS
    """Thresholds τ of the event rates Φ_τ."""
    spike: float = SPIKE
    """Rise of the loss from one step to the next that counts as a spike, in nats."""
    tokens_available: int | None = None
    """Tokens of the training text, where they are known."""

    def __post_init__(self) -> None:
        check_counts(self, ("gradient_blocks",), least=0)
        check_numbers(self, ("diag_coef",), positive=True)
        for name in ("adam_every", "tokens_available"):
            if getattr(self, name) is not None:
                check_counts(self, (name,))

    def settings(self) -> dict[str, Any]:
        """As config.json holds them."""
        return {name: value for name, value in asdict(self).items() if name != "tokens_available"}


@dataclass(frozen=True)
class MethodNumbers:
    """An objective under the keys of config.json."""

    method: str
    coef: float
    target: float | None
    gain_beta: float
    numbers: dict[str, Any]


def method_numbers(objective: Objective) -> MethodNumbers:
    """Method, λ, target and β of an objective; of Factorized those of its relative part."""
    found: Any = objective
    values = {entry.name: getattr(found, entry.name) for entry in fields(found)}
    coef = values.get("coef", values.get("relative_coef"))
    return MethodNumbers(
        method=objective.name,
        coef=float(coef or 0.0),
        target=values.get("target", values.get("relative_target")),
        gain_beta=float(values.get("beta", GAIN_BETA)),
        numbers=values,
    )


def plain_settings(settings: dict[str, Any] | None) -> dict[str, Any]:
    """The loop's settings; a value that JSON has no place for is refused by its name."""
    found = dict(settings or {})
    for name, value in found.items():
        if not isinstance(value, (str, int, float, bool, list, tuple, dict, type(None))):
            raise InputError(
                f"`settings[{name!r}]` is expected to be a number, text, list or dict, but is a {type(value).__name__}."
            )
    return found
