"""What the page and the figure files draw: histograms, spectra, a sample of tokens, the extreme tokens.

Everything here is small and already reduced; nothing is needed beyond it to rebuild every figure from report.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Coordinate = Literal["raw", "centered"]
Quantity = Literal["violation", "gain", "shift", "delta_u"]
"""|log Z − c|, A_p, |μ|, ‖δ_u‖₂."""

MAX_SAMPLE = 5000
MAX_SINGULAR_VALUES = 256


def column(values: Any) -> tuple[float, ...]:
    """A column of a sample, from an array, a tensor or a list: six digits draw the same picture in a third of the bytes.

    >>> column([0.1234567891, 2.0])
    (0.123457, 2.0)
    """
    items = values.tolist() if hasattr(values, "tolist") else values
    return tuple(float(f"{item:.6g}") for item in items)


@dataclass(frozen=True)
class Histogram:
    """Counts of finite token values between `edges` (one more edge than counts), linear or logarithmic bins."""

    quantity: Quantity
    coordinate: Coordinate
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Spectrum:
    """The largest singular values of the head, descending, at most `MAX_SINGULAR_VALUES` of each."""

    raw: tuple[float, ...] = ()
    centered: tuple[float, ...] = ()
    method: str = "exact"
    """"exact" (Gram matrix, fp64) or "randomized"."""


@dataclass(frozen=True)
class GeometrySample:
    """Columns over at most `MAX_SAMPLE` tokens for the three panels of paper fig:gradient_geometry.

    With q_t = Wᵀp_t: panel a draws (x, y) = (q·e₁, q·e₂) raw and (q − w̄)·e₁, (q − w̄)·e₂ centered, e₁ = w̄/‖w̄‖ and e₂
    the leading principal direction of the centered cloud {q − w̄} after e₁ is projected out. Panel b draws
    ‖V₁₆ᵀq‖²/‖p‖² against a² = ‖q‖²/‖p‖² (centered: q − w̄ with the centered V₁₆). Panel c draws ‖δ_u‖ = a·‖δ_z‖
    against ‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖. A column that does not exist for the model is empty.
    """

    x_raw: tuple[float, ...] = ()
    y_raw: tuple[float, ...] = ()
    x_centered: tuple[float, ...] = ()
    y_centered: tuple[float, ...] = ()
    a2_raw: tuple[float, ...] = ()
    rank16_raw: tuple[float, ...] = ()
    a2_centered: tuple[float, ...] = ()
    rank16_centered: tuple[float, ...] = ()
    delta_z_raw: tuple[float, ...] = ()
    delta_u_raw: tuple[float, ...] = ()
    delta_z_centered: tuple[float, ...] = ()
    delta_u_centered: tuple[float, ...] = ()
    mean_row_norm: float | None = None
    """‖w̄‖₂: the length of the translation in panel a."""
    drawn_from: int | None = None
    """Number of tokens the sample was drawn from."""
    note: str = ""
    """How it was drawn, e.g. "every 7th token, and all extreme tokens"."""

    def __len__(self) -> int:
        return max(len(self.x_raw), len(self.a2_raw), len(self.delta_z_raw))


@dataclass(frozen=True)
class ExtremeToken:
    """One token of a table of extremes, in its context."""

    block: int
    position: int
    """Index of the prediction inside its block, from 0."""
    target: str
    """Text of the predicted token."""
    context: str
    """Text of some tokens before it."""
    log_z: float | None = None
    log_z_centered: float | None = None
    mu: float | None = None
    gain: float | None = None
    gain_centered: float | None = None
    ce: float | None = None
    """−log p(target), nats."""


@dataclass(frozen=True)
class ExtremeTable:
    """The k most extreme tokens by one quantity, most extreme first."""

    quantity: Quantity
    coordinate: Coordinate
    tokens: tuple[ExtremeToken, ...]


@dataclass(frozen=True)
class Figures:
    """All data of the figures."""

    histograms: tuple[Histogram, ...] = ()
    spectrum: Spectrum | None = None
    geometry: GeometrySample | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def histogram(self, quantity: Quantity, coordinate: Coordinate) -> Histogram | None:
        """The histogram of one quantity in one coordinate, if it was recorded."""
        found = (h for h in self.histograms if h.quantity == quantity and h.coordinate == coordinate)
        return next(found, None)
