"""The numbers that a pass over tokens gives for one head, one line each: field, values, accumulator, quantile.

`Tails` builds its accumulators, its updates, its answers, its bounds and its saved state from these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from zloss.measure.token_table import TokensInCoordinate
from zloss.results.figure_data import Quantity
from zloss.streaming import CoMoments, Moments, Quantiles
from zloss.streaming.accumulator import Accumulator

Values = Callable[[TokensInCoordinate], Tensor | None]


def _violation(tokens: TokensInCoordinate) -> Tensor:
    return tokens.violation


def _gain(tokens: TokensInCoordinate) -> Tensor:
    return tokens.gain


def _shift(tokens: TokensInCoordinate) -> Tensor | None:
    return None if tokens.mu is None else tokens.mu.abs()


def _squared_shift(tokens: TokensInCoordinate) -> Tensor | None:
    return None if tokens.mu is None else tokens.mu.double() ** 2


def _delta_u(tokens: TokensInCoordinate) -> Tensor:
    return tokens.delta_u


def squared_gain(tokens: TokensInCoordinate) -> Tensor:
    """A_p² in fp64."""
    return tokens.gain.double() ** 2


def _leading(tokens: TokensInCoordinate) -> Tensor:
    return tokens.leading.double()


@dataclass(frozen=True)
class TailNumber:
    """One field of `HeadNumbers`: which values enter which accumulator, and how the accumulator answers.

    Moments answer with their mean, Quantiles with the value at `quantile`, CoMoments with the correlation of the two
    columns. A column that is None, because μ does not exist, enters nothing, and the number is None.
    """

    field: str
    values: tuple[Values, ...]
    accumulator: type[Moments] | type[Quantiles] | type[CoMoments]
    quantile: float | None = None
    finish: Callable[[float, float], float] = lambda answer, coef: answer
    """(answer of the accumulator, λ_diag) to the number."""

    def update(self, accumulator: Accumulator, tokens: TokensInCoordinate) -> None:
        """Take the tokens of a chunk."""
        columns = [values(tokens) for values in self.values]
        if all(column is not None for column in columns):
            accumulator.update(*columns)

    def answer(self, accumulator: Accumulator, coef: float) -> float | None:
        """The number; None where the accumulator has no values."""
        found = self._answer(accumulator)
        return None if found is None else self.finish(found, coef)

    def _answer(self, accumulator: Accumulator) -> float | None:
        if isinstance(accumulator, Quantiles):
            assert self.quantile is not None
            estimate = accumulator.quantile(self.quantile)
            return None if estimate is None else estimate.value
        if isinstance(accumulator, CoMoments):
            return accumulator.correlation
        assert isinstance(accumulator, Moments)
        return accumulator.mean


HEAD_NUMBERS: tuple[TailNumber, ...] = (
    TailNumber("diag_z", (lambda t: t.violation.double() ** 2,), Moments, finish=lambda mean, coef: coef * mean),
    TailNumber("p_z_999", (_violation,), Quantiles, 0.999),
    TailNumber("a_p_mean", (_gain,), Moments),
    TailNumber("a_p_99", (_gain,), Quantiles, 0.99),
    TailNumber("log_z_mean", (lambda t: t.log_z,), Moments),
    TailNumber("mu_abs_99", (_shift,), Quantiles, 0.99),
    TailNumber("mu_rms", (_squared_shift,), Moments, finish=lambda mean, coef: math.sqrt(mean)),
    TailNumber("delta_u_99", (_delta_u,), Quantiles, 0.99),
    TailNumber("delta_u_99_gain_aware", (lambda t: t.delta_u_gain_aware,), Quantiles, 0.99),
    TailNumber("row_max_999", (lambda t: t.row_max,), Quantiles, 0.999),
    TailNumber("f_16", (lambda t: _leading(t) / squared_gain(t),), Moments),
    TailNumber("rho_16", (squared_gain, _leading), CoMoments),
)
"""All of `HeadNumbers` but the spectrum, which does not depend on tokens."""

HISTOGRAMS: dict[Quantity, Values] = {
    "violation": _violation,
    "gain": _gain,
    "shift": _shift,
    "delta_u": _delta_u,
}
"""What the histograms of the page count."""

EXTREMES: dict[Quantity, Callable[[TokensInCoordinate], Tensor]] = {"violation": _violation, "gain": _gain}
"""By what the tables of extreme tokens are ordered."""

SAMPLE: dict[str, Callable[[TokensInCoordinate], Tensor]] = {
    "a2": squared_gain,
    "rank16": lambda t: t.leading,
    "delta_z": lambda t: t.delta_z,
    "delta_u": _delta_u,
}
"""Columns of the token sample; Wᵀp is added where the figure has a plane, to give x and y."""
