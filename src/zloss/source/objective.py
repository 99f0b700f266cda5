"""What an objective is: a value per token and the coefficients of its logit source.

Every objective of the paper adds to cross-entropy a logit adjoint with only two shapes,

    δᶻ_t = along_p_t · p_t  −  along_uniform_t · 1/V

so an objective is a pure function of per-token statistics and knows no kernel; a backend turns the coefficients into
gradients and knows no objective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zloss.errors import CoefficientError, CoordinateError, MissingInputError
from zloss.results.coordinate import Coordinate as Coordinate
from zloss.source.number_kind import is_number as is_number
from zloss.source.statistics import TokenStats


@dataclass(frozen=True)
class Source:
    """The auxiliary value and logit source of every token. Scaling: per token, before any reduction."""

    value: Tensor
    along_p: Tensor
    along_uniform: Tensor | None = None


class Objective(ABC):
    """Cross-entropy plus a penalty on the log-normalizer. Subclasses are frozen dataclasses, one per file."""

    name: ClassVar[str]
    """The name on the command line."""
    coordinate: ClassVar[Coordinate] = "raw"
    """The logits this method deploys: raw, or row-centered."""
    needs_mu: ClassVar[bool] = False
    needs_gain: ClassVar[bool] = False

    @property
    @abstractmethod
    def active(self) -> bool:
        """False when every coefficient is None or 0: then the objective is cross-entropy, bit for bit."""

    @abstractmethod
    def penalty(self, logits_TV: Tensor, gain_T: Tensor | None) -> Tensor:
        """The definition, in differentiable tensor operations on whole logits: the truth the source is tested against."""

    @abstractmethod
    def source(self, stats: TokenStats) -> Source:
        """Value and logit-source coefficients from the statistics."""


def check_coefficient(name: str, value: float | None) -> None:
    """A coefficient is None or a finite number ≥ 0."""
    if value is None:
        return
    expected = f"`{name}` is expected to be None (off) or a finite number ≥ 0, but got {value!r}"
    if not (is_number(value) and math.isfinite(value)):
        raise CoefficientError(f"{expected}.")
    if value < 0:
        raise CoefficientError(f"{expected}: a negative penalty would drive log Z away from its target.")


def check_target(name: str, value: float | None) -> None:
    """A target is None (log V) or a finite number."""
    if value is not None and not (is_number(value) and math.isfinite(value)):
        raise CoefficientError(f"`{name}` is expected to be None (log V) or a finite number, but got {value!r}.")


def is_on(*coefficients: float | None) -> bool:
    """Whether any coefficient is switched on; None and 0 are both off."""
    return any(coefficient is not None and coefficient != 0 for coefficient in coefficients)


def off_is_zero(coefficient: float | None) -> float:
    """The coefficient as a number: None is 0, and 0 stays 0."""
    return 0.0 if coefficient is None else coefficient


def resolve_target(target: float | None, vocab: int) -> float:
    """c, with None meaning log V: then the zero logit vector has no violation."""
    return math.log(vocab) if target is None else target


def require_centered_log_z(stats: TokenStats, method: str) -> Tensor:
    """log Z̃, or the reason why it does not exist."""
    if stats.log_z_centered is None:
        raise CoordinateError(
            f"{method} needs the mean logit μ, which does not exist for softcapped logits or a -inf bias. "
            "Use StandardZLoss, or exclude the -inf rows with `valid_vocab`."
        )
    return stats.log_z_centered


def require_gain(gain: Tensor | None, method: str) -> Tensor:
    """The gain A_p, or what to pass to get it."""
    if gain is None:
        raise MissingInputError(f"{method} needs the output-to-hidden gain: pass `weight`, the [V, D] output head.")
    return gain
