"""The accumulators of one pass over tokens, and the numbers they answer with.

All of them can be merged and saved, so an interrupted pass can go on and passes of several processes can be joined.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from zloss.measure.geometry_plane import places_in_plane
from zloss.measure.measurement import Measurement
from zloss.measure.tail_table import EXTREMES, HEAD_NUMBERS, HISTOGRAMS, SAMPLE
from zloss.measure.token_table import TokenTable
from zloss.results.audit import HeadNumbers, Nonfinite, QuantileBound
from zloss.results.coordinate import Coordinate
from zloss.results.figure_data import MAX_SAMPLE, DrawnHistogram, GeometrySample, Quantity
from zloss.streaming import Count, HashSample, Moments, Quantiles, TopTokens, pack, unpack
from zloss.streaming import Histogram as StreamHistogram
from zloss.streaming.accumulator import Accumulator, State
from zloss.streaming.over_ranks import Exchange, merged

A = TypeVar("A", bound=Accumulator)
TOP_K = 20
TOP_FLOATS = ("log_z", "log_z_centered", "mu", "gain", "gain_centered", "ce")
SHAPE = "shape"
"""Wᵀp of the sampled tokens."""


class Tails:
    """Streaming statistics of all tokens seen, in raw and (where it exists) centered coordinates.

    `plane` says whether the sampled tokens keep Wᵀp, from which the plane of the gradient-geometry figure is found; `seed`
    chooses the sample of tokens.
    """

    def __init__(self, measurement: Measurement, *, plane: bool = False, seed: int = 0) -> None:
        self.coordinates = measurement.coordinates
        self._measurement, self._plane = measurement, plane
        self._all: dict[str, Accumulator] = {"ce": Moments(), "finite": Count()}
        for coordinate in self.coordinates:
            for number in HEAD_NUMBERS:
                self._all[f"{coordinate}/{number.field}"] = number.accumulator()
            for name in HISTOGRAMS:
                self._all[f"{coordinate}/{name}/histogram"] = StreamHistogram(256)
            for name in EXTREMES:
                self._all[f"{coordinate}/{name}/top"] = TopTokens(TOP_K, floats=TOP_FLOATS)
            vectors = {SHAPE: measurement.head.width} if plane and coordinate == "raw" else {}
            self._all[f"{coordinate}/sample"] = HashSample(MAX_SAMPLE, floats=tuple(SAMPLE), vectors=vectors, seed=seed)

    def layout(self) -> str:
        """Identity of the accumulators by name, kind and columns: a saved state of another layout cannot be restored."""
        names = sorted(f"{name}:{type(each).__name__}:{_columns(each)}" for name, each in self._all.items())
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]

    def state(self) -> State:
        """Everything that `restore` needs."""
        return pack(self._all)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same layout."""
        self._all = unpack(state)

    def join(self, exchange: Exchange) -> None:
        """Take in what the passes of all ranks have seen, in rank order; a rank to which nothing is given keeps its own."""
        whole = merged(self._all, exchange)
        if whole is not None:
            self._all = whole

    def update(self, table: TokenTable, first_position: int) -> None:
        """Take a chunk whose first token has this index in the whole text."""
        position = np.arange(first_position, first_position + len(table.ce))
        self._all["ce"].update(table.ce)
        self._all["finite"].update(_health(table))
        known = _known(table)
        for coordinate in self.coordinates:
            tokens = table.tokens_in(coordinate)
            assert tokens is not None
            for number in HEAD_NUMBERS:
                number.update(self._all[f"{coordinate}/{number.field}"], tokens)
            for name, values in HISTOGRAMS.items():
                if (column := values(tokens)) is not None:
                    self._all[f"{coordinate}/{name}/histogram"].update(column)
            for name, score in EXTREMES.items():
                self._all[f"{coordinate}/{name}/top"].update(score(tokens), position=position, **known)
            sampled = {name: values(tokens) for name, values in SAMPLE.items()}
            if self._plane and coordinate == "raw":
                sampled[SHAPE] = table.shaped.shape_CD
            self._all[f"{coordinate}/sample"].update(position, **sampled)

    @property
    def count(self) -> int:
        """Tokens seen, finite or not."""
        return self._get("finite", Count).total

    @property
    def cross_entropy(self) -> float | None:
        """Mean cross-entropy over finite tokens, nats; None without any."""
        return self._get("ce", Moments).mean

    def perplexity(self) -> float | None:
        """exp of the mean cross-entropy over finite tokens; None without any, or where it overflows."""
        mean = self.cross_entropy
        return None if mean is None or mean > 700 else math.exp(mean)

    def nonfinite(self) -> Nonfinite:
        """Tokens with a NaN or infinite statistic."""
        counts = self._get("finite", Count)
        return Nonfinite(nan=counts.nan, inf=counts.positive_infinite + counts.negative_infinite)

    def numbers(self, coordinate: Coordinate) -> HeadNumbers:
        """The numbers of the tokens and of the head's spectrum; all None in a coordinate that does not exist."""
        if coordinate not in self.coordinates:
            return HeadNumbers()
        found = {
            number.field: number.answer(self._all[f"{coordinate}/{number.field}"], self._measurement.coef)
            for number in HEAD_NUMBERS
        }
        spectrum = self._measurement.spectrum(coordinate)
        return HeadNumbers(**found, sigma_1=spectrum.sigma_1, e_1=spectrum.share(1), e_16=spectrum.share(16))

    def bounds(self) -> dict[str, QuantileBound]:
        """Bounds of every quantile that a sketch answered, by the dotted path of its number."""
        found = {}
        for coordinate in self.coordinates:
            for number in HEAD_NUMBERS:
                quantiles = self._all[f"{coordinate}/{number.field}"]
                if not isinstance(quantiles, Quantiles) or number.quantile is None:
                    continue
                estimate = quantiles.quantile(number.quantile)
                if estimate is not None and not estimate.exact:
                    path = f"heads.{coordinate}.{number.field}"
                    found[path] = QuantileBound(estimate.lower, estimate.upper, quantiles.count)
        return found

    def histograms(self) -> tuple[DrawnHistogram, ...]:
        """Bars of every histogram that has values, without the centered shift, which is rounding noise."""
        found = []
        for coordinate in self.coordinates:
            for name in HISTOGRAMS:
                bars = self._get(f"{coordinate}/{name}/histogram", StreamHistogram).bars()
                if bars is not None and not (coordinate == "centered" and name == "shift"):
                    edges, counts = bars
                    found.append(DrawnHistogram(name, coordinate, tuple(edges.tolist()), tuple(counts.tolist())))
        return tuple(found)

    def sample(self) -> GeometrySample:
        """The token sample of the gradient-geometry figure; both coordinates hold the same tokens."""
        mean_row_D = self._measurement.mean_row_D
        columns: dict[str, tuple[float, ...]] = {}
        drawn_from = 0
        for coordinate in self.coordinates:
            sample = self._get(f"{coordinate}/sample", HashSample)
            drawn_from = sample.counts.finite
            table = sample.table()
            columns |= {f"{name}_{coordinate}": tuple(table[name].tolist()) for name in sample.floats}
            if SHAPE in table:
                columns |= places_in_plane(torch.from_numpy(table[SHAPE]), mean_row_D, self.coordinates)
        return GeometrySample(
            **columns,
            mean_row_norm=float(mean_row_D.norm()),
            drawn_from=drawn_from,
            note=f"at most {MAX_SAMPLE} tokens, chosen by a hash of their position in the text",
        )

    def top(self, coordinate: Coordinate, quantity: Quantity) -> list[dict[str, int | float]]:
        """The most extreme tokens by one quantity, largest first, with the columns of `TOP_FLOATS`."""
        return self._get(f"{coordinate}/{quantity}/top", TopTokens).rows()

    def _get(self, name: str, kind: type[A]) -> A:
        accumulator = self._all[name]
        assert isinstance(accumulator, kind)
        return accumulator


def _columns(accumulator: Accumulator) -> str:
    """The columns of a sample; empty for other accumulators."""
    return repr((accumulator.floats, accumulator.vectors)) if isinstance(accumulator, HashSample) else ""


def _known(table: TokenTable) -> dict[str, Tensor]:
    """What the tables of extreme tokens show of each token; NaN where it does not exist."""
    missing = torch.full_like(table.ce, torch.nan)
    return {
        "log_z": table.raw.log_z,
        "log_z_centered": missing if table.centered is None else table.centered.log_z,
        "mu": missing if table.raw.mu is None else table.raw.mu,
        "gain": table.raw.gain,
        "gain_centered": missing if table.centered is None else table.centered.gain,
        "ce": table.ce,
    }


def _health(table: TokenTable) -> Tensor:
    """0 for a token with finite statistics, NaN or Inf for one with such a statistic (NaN where both)."""
    parts = torch.stack([table.ce, table.raw.log_z, table.raw.gain])
    nan, inf = parts.isnan().any(dim=0), parts.isinf().any(dim=0)
    zero = torch.zeros_like(table.ce)
    return torch.where(nan, torch.nan, torch.where(inf, torch.inf, zero))
