"""What the page and the figure files draw: histograms, spectra, a sample of tokens, the extreme tokens.

Everything here is small and already reduced; nothing is needed beyond it to rebuild every figure from report.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from zloss.errors import InputError
from zloss.results.checks import check_columns
from zloss.results.coordinate import Coordinate

Quantity = Literal["violation", "gain", "shift", "delta_u"]
"""|log Z − c|, A_p, |μ|, ‖δ_u‖₂."""

_DRAWN_TOGETHER = (("x", "y"), ("a2", "rank16"), ("delta_z", "delta_u"))
"""Columns of a sample that are the two axes of one panel."""

MAX_SAMPLE = 5000
MAX_SINGULAR_VALUES = 256


@dataclass(frozen=True)
class DrawnHistogram:
    """Counts of finite token values between `edges` (one more edge than counts), linear or logarithmic bins."""

    quantity: Quantity
    """The token quantity."""
    coordinate: Coordinate
    """The coordinate of its logits."""
    edges: tuple[float, ...]
    """Edges of the bins, ascending."""
    counts: tuple[int, ...]
    """Tokens in each bin."""

    def __post_init__(self) -> None:
        if (self.edges or self.counts) and len(self.edges) != len(self.counts) + 1:
            raise InputError(
                f"`edges` is expected to have one entry more than `counts`, but they have {len(self.edges)} and "
                f"{len(self.counts)}."
            )


@dataclass(frozen=True)
class Spectrum:
    """The largest singular values of the head, descending, at most `MAX_SINGULAR_VALUES` of each."""

    raw: tuple[float, ...] = ()
    """σ_i of W."""
    centered: tuple[float, ...] = ()
    """σ_i of W − 1w̄ᵀ."""
    method: str = "exact"
    """"exact" (Gram matrix, fp64) or "randomized"."""


@dataclass(frozen=True)
class GeometrySample:
    """Columns over at most `MAX_SAMPLE` tokens for the three panels of paper fig:gradient_geometry.

    With q_t = Wᵀp_t: panel a draws (x, y) = (q·e₁, q·e₂) raw and (q − w̄)·e₁, (q − w̄)·e₂ centered, e₁ = w̄/‖w̄‖ and e₂
    the leading principal direction of the centered cloud {q − w̄} of these tokens after e₁ is projected out. Panel b draws
    ‖V₁₆ᵀq‖²/‖p‖² against a² = ‖q‖²/‖p‖² (centered: q − w̄ with the centered V₁₆). Panel c draws ‖δ_u‖ = a·‖δ_z‖
    against ‖δ_z‖ = 2λ_diag·|log Z − c|·‖p‖. A column that does not exist for the model is empty.
    """

    x_raw: tuple[float, ...] = ()
    """q·e₁ of each token."""
    y_raw: tuple[float, ...] = ()
    """q·e₂."""
    x_centered: tuple[float, ...] = ()
    """(q − w̄)·e₁."""
    y_centered: tuple[float, ...] = ()
    """(q − w̄)·e₂."""
    a2_raw: tuple[float, ...] = ()
    """a² of the raw head."""
    rank16_raw: tuple[float, ...] = ()
    """Its part in the first 16 singular directions."""
    a2_centered: tuple[float, ...] = ()
    """a² of the centered head."""
    rank16_centered: tuple[float, ...] = ()
    """Its part in the first 16 singular directions of the centered head."""
    delta_z_raw: tuple[float, ...] = ()
    """‖δ_z‖ on raw logits."""
    delta_u_raw: tuple[float, ...] = ()
    """‖δ_u‖ on raw logits."""
    delta_z_centered: tuple[float, ...] = ()
    """‖δ_z‖ on row-centered logits."""
    delta_u_centered: tuple[float, ...] = ()
    """‖δ_u‖ on row-centered logits."""
    mean_row_norm: float | None = None
    """‖w̄‖₂: the length of the translation in panel a."""
    drawn_from: int | None = None
    """Number of tokens the sample was drawn from."""
    note: str = ""
    """How it was drawn, e.g. "every 7th token, and all extreme tokens"."""

    def __post_init__(self) -> None:
        columns = [(f"{x}_{head}", f"{y}_{head}") for x, y in _DRAWN_TOGETHER for head in ("raw", "centered")]
        for pair in columns:
            # One column alone cannot be drawn: it counts as absent too.
            if not all(getattr(self, name) for name in pair):
                for name in pair:
                    object.__setattr__(self, name, ())
        check_columns(self, tuple(name for pair in columns for name in pair if getattr(self, name)))

    def __len__(self) -> int:
        return max(len(self.x_raw), len(self.a2_raw), len(self.delta_z_raw))


@dataclass(frozen=True)
class ExtremeToken:
    """One token of a table of extremes, in its context."""

    block: int
    """Index of its block in the text, from 0."""
    position: int
    """Index of the prediction inside its block, from 0."""
    target: str
    """Text of the predicted token."""
    context: str
    """Text of some tokens before it."""
    log_z: float | None = None
    """log Z."""
    log_z_centered: float | None = None
    """log Z − μ."""
    mu: float | None = None
    """Mean logit."""
    gain: float | None = None
    """A_p of the raw head."""
    gain_centered: float | None = None
    """A_p of the centered head."""
    ce: float | None = None
    """−log p(target), nats."""


@dataclass(frozen=True)
class ExtremeTable:
    """The k most extreme tokens by one quantity, most extreme first."""

    quantity: Quantity
    """The quantity that orders the table."""
    coordinate: Coordinate
    """Its coordinate."""
    tokens: tuple[ExtremeToken, ...]
    """The tokens."""


@dataclass(frozen=True)
class Figures:
    """All data of the figures."""

    histograms: tuple[DrawnHistogram, ...] = ()
    """Tails over tokens."""
    spectrum: Spectrum | None = None
    """Singular values of the head."""
    geometry: GeometrySample | None = None
    """A sample of tokens for the scatter panels."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a newer version."""

    def histogram(self, quantity: Quantity, coordinate: Coordinate) -> DrawnHistogram | None:
        """The histogram of one quantity in one coordinate, if it was recorded."""
        found = (h for h in self.histograms if h.quantity == quantity and h.coordinate == coordinate)
        return next(found, None)
