"""The accumulators of an audit's pass over the text, and the numbers they answer with.

Everything is mergeable and can be saved, so that an interrupted audit goes on and ranks can be joined.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from zloss.measure.token_table import Coordinate, TokenTable
from zloss.results.audit import HeadNumbers, Nonfinite, QuantileBound
from zloss.results.figure_data import MAX_SAMPLE, DrawnHistogram, GeometrySample, Quantity
from zloss.streaming import CoMoments, Count, HashSample, Moments, Quantiles, TopTokens, pack, unpack
from zloss.streaming import Histogram as StreamHistogram
from zloss.streaming.accumulator import Accumulator, State

A = TypeVar("A", bound=Accumulator)
Side = Literal["raw", "centered"]
SIDES: tuple[Side, ...] = ("raw", "centered")
TOP_K = 20
TOP_FLOATS = ("log_z", "log_z_centered", "mu", "gain", "gain_centered", "ce")
SAMPLE_FLOATS = ("a2", "rank16", "delta_z", "delta_u", "x", "y")
HISTOGRAMS: tuple[Quantity, ...] = ("violation", "gain", "shift", "delta_u")


class Tails:
    """Streaming statistics of all tokens seen, in raw and (where it exists) centered coordinates."""

    def __init__(self, *, centered: bool, plane: bool, beta: float, seed: int) -> None:
        self.sides: tuple[Side, ...] = SIDES if centered else ("raw",)
        self.plane, self.beta = plane, beta
        columns = SAMPLE_FLOATS if plane else SAMPLE_FLOATS[:4]
        self.all: dict[str, Accumulator] = {"ce": Moments(), "finite": Count()}
        for side in self.sides:
            for name in ("violation", "gain", "shift", "delta_u", "delta_u_gain_aware", "row_max"):
                self.all[f"{side}/{name}/quantiles"] = Quantiles()
            for name in ("squared_violation", "gain", "log_z", "squared_mu", "leading_share"):
                self.all[f"{side}/{name}/moments"] = Moments()
            for name in HISTOGRAMS:
                self.all[f"{side}/{name}/histogram"] = StreamHistogram(256)
            self.all[f"{side}/leading/comoments"] = CoMoments()
            for name in ("violation", "gain"):
                self.all[f"{side}/{name}/top"] = TopTokens(TOP_K, floats=TOP_FLOATS)
            self.all[f"{side}/sample"] = HashSample(MAX_SAMPLE, floats=columns, seed=seed)

    def state(self) -> State:
        return pack(self.all)

    def restore(self, state: dict[str, Any]) -> None:
        self.all = unpack(state)

    def update(self, table: TokenTable, first_position: int) -> None:
        """Take a chunk whose first token has this index in the whole text."""
        position = np.arange(first_position, first_position + len(table.ce))
        self.all["ce"].update(table.ce)
        self.all["finite"].update(_health(table))
        missing = torch.full_like(table.ce, torch.nan)
        known = {
            "log_z": table.raw.log_z,
            "log_z_centered": missing if table.centered is None else table.centered.log_z,
            "mu": missing if table.raw.mu is None else table.raw.mu,
            "gain": table.raw.gain,
            "gain_centered": missing if table.centered is None else table.centered.gain,
            "ce": table.ce,
        }
        for side in self.sides:
            coordinate = table.raw if side == "raw" else table.centered
            assert coordinate is not None
            self._update_side(side, coordinate, position, known)

    def _update_side(self, side: Side, c: Coordinate, position: Any, known: dict[str, Tensor]) -> None:
        a2, delta_u = c.gain.double() ** 2, c.delta_u
        values = {
            "violation": c.violation,
            "gain": c.gain,
            "delta_u": delta_u,
            "delta_u_gain_aware": delta_u / (1 + self.beta * c.gain**2),
            "row_max": c.row_max,
        }
        if c.mu is not None:
            values["shift"] = c.mu.abs()
            self.all[f"{side}/squared_mu/moments"].update(c.mu.double() ** 2)
        for name, value in values.items():
            self.all[f"{side}/{name}/quantiles"].update(value)
            if name in HISTOGRAMS:
                self.all[f"{side}/{name}/histogram"].update(value)
        self.all[f"{side}/squared_violation/moments"].update(c.violation.double() ** 2)
        self.all[f"{side}/gain/moments"].update(c.gain)
        self.all[f"{side}/log_z/moments"].update(c.log_z)
        self.all[f"{side}/leading_share/moments"].update(c.leading.double() / a2)
        self.all[f"{side}/leading/comoments"].update(a2, c.leading.double())
        for name, score in (("violation", c.violation), ("gain", c.gain)):
            self.all[f"{side}/{name}/top"].update(score, position=position, **known)
        sample = {"a2": a2, "rank16": c.leading, "delta_z": c.delta_z, "delta_u": delta_u}
        if self.plane and c.plane is not None:
            sample |= {"x": c.plane[:, 0], "y": c.plane[:, 1]}
        self.all[f"{side}/sample"].update(position, **sample)

    @property
    def count(self) -> int:
        """Tokens seen, finite or not."""
        return self._get("finite", Count).total

    def perplexity(self) -> float | None:
        """exp of the mean cross-entropy over finite tokens; None without any, or where it overflows."""
        mean = self._get("ce", Moments).mean
        return None if mean is None or mean > 700 else math.exp(mean)

    def nonfinite(self) -> Nonfinite:
        counts = self._get("finite", Count)
        return Nonfinite(nan=counts.nan, inf=counts.positive_infinite + counts.negative_infinite)

    def numbers(self, side: Side, coef: float) -> HeadNumbers:
        """Everything of HeadNumbers but the spectrum itself."""
        if side not in self.sides:
            return HeadNumbers()
        squared = self._moments(side, "squared_violation").mean
        squared_mu = self._moments(side, "squared_mu").mean
        return HeadNumbers(
            diag_z=None if squared is None else coef * squared,
            p_z_999=self._quantile(side, "violation", 0.999),
            a_p_mean=self._moments(side, "gain").mean,
            a_p_99=self._quantile(side, "gain", 0.99),
            log_z_mean=self._moments(side, "log_z").mean,
            mu_abs_99=self._quantile(side, "shift", 0.99),
            mu_rms=None if squared_mu is None else math.sqrt(squared_mu),
            delta_u_99=self._quantile(side, "delta_u", 0.99),
            delta_u_99_gain_aware=self._quantile(side, "delta_u_gain_aware", 0.99),
            row_max_999=self._quantile(side, "row_max", 0.999),
            f_16=self._moments(side, "leading_share").mean,
            rho_16=self._get(f"{side}/leading/comoments", CoMoments).correlation,
        )

    def bounds(self) -> dict[str, QuantileBound]:
        """Bounds of every quantile that a sketch answered, by the dotted path of its number."""
        paths = {
            "p_z_999": ("violation", 0.999),
            "a_p_99": ("gain", 0.99),
            "mu_abs_99": ("shift", 0.99),
            "delta_u_99": ("delta_u", 0.99),
            "delta_u_99_gain_aware": ("delta_u_gain_aware", 0.99),
            "row_max_999": ("row_max", 0.999),
        }
        found = {}
        for side in self.sides:
            for key, (name, q) in paths.items():
                quantiles = self._get(f"{side}/{name}/quantiles", Quantiles)
                estimate = quantiles.quantile(q)
                if estimate is not None and not estimate.exact:
                    found[f"heads.{side}.{key}"] = QuantileBound(estimate.lower, estimate.upper, quantiles.count)
        return found

    def histograms(self) -> tuple[DrawnHistogram, ...]:
        """Bars of every histogram that has values; the centered shift is rounding noise and left out."""
        found = []
        for side in self.sides:
            for name in HISTOGRAMS:
                bars = self._get(f"{side}/{name}/histogram", StreamHistogram).bars()
                if bars is not None and not (side == "centered" and name == "shift"):
                    edges, counts = bars
                    found.append(DrawnHistogram(name, side, tuple(edges.tolist()), tuple(counts.tolist())))
        return tuple(found)

    def sample(self, mean_row_norm: float) -> GeometrySample:
        """The token sample of the gradient-geometry figure; both sides hold the same tokens."""
        columns: dict[str, tuple[float, ...]] = {}
        drawn_from = 0
        for side in self.sides:
            sample = self._get(f"{side}/sample", HashSample)
            drawn_from = sample.counts.finite
            table = sample.table()
            columns |= {f"{name}_{side}": tuple(table[name].tolist()) for name in sample.floats}
        return GeometrySample(
            **columns,
            mean_row_norm=mean_row_norm,
            drawn_from=drawn_from,
            note=f"at most {MAX_SAMPLE} tokens, chosen by a hash of their position in the text",
        )

    def top(self, side: Side, name: str) -> list[dict[str, int | float]]:
        return self._get(f"{side}/{name}/top", TopTokens).rows()

    def _moments(self, side: Side, name: str) -> Moments:
        return self._get(f"{side}/{name}/moments", Moments)

    def _quantile(self, side: Side, name: str, q: float) -> float | None:
        estimate = self._get(f"{side}/{name}/quantiles", Quantiles).quantile(q)
        return None if estimate is None else estimate.value

    def _get(self, name: str, kind: type[A]) -> A:
        accumulator = self.all[name]
        assert isinstance(accumulator, kind)
        return accumulator


def _health(table: TokenTable) -> Tensor:
    """0 for a sound token, NaN or Inf for one with such a statistic (NaN where both)."""
    parts = torch.stack([table.ce, table.raw.log_z, table.raw.gain])
    nan, inf = parts.isnan().any(dim=0), parts.isinf().any(dim=0)
    zero = torch.zeros_like(table.ce)
    return torch.where(nan, torch.nan, torch.where(inf, torch.inf, zero))
