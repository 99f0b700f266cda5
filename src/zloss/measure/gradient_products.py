"""Inner products of gradients, and the ratios and cosines read from them.

Scaling: gradients are mean-reduced over the predictions of the batch, coefficients included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zloss.results.gradient_numbers import PathNumbers


@dataclass(frozen=True)
class AgainstCe:
    """‖g‖², ‖g_CE‖² and ⟨g, g_CE⟩ over one set of parameters; those of disjoint sets add."""

    square: float
    ce_square: float
    dot: float

    def __add__(self, other: AgainstCe) -> AgainstCe:
        return AgainstCe(self.square + other.square, self.ce_square + other.ce_square, self.dot + other.dot)

    @property
    def norm(self) -> float:
        """‖g‖."""
        return math.sqrt(self.square)

    @property
    def ce_norm(self) -> float:
        """‖g_CE‖."""
        return math.sqrt(self.ce_square)

    @property
    def ratio(self) -> float | None:
        """R = ‖g‖/‖g_CE‖; None where the gradient of CE vanishes."""
        return None if self.ce_square <= 0 else self.norm / self.ce_norm

    @property
    def cosine(self) -> float | None:
        """C = cos(g, g_CE); None where either gradient vanishes."""
        lengths = self.norm * self.ce_norm
        return self.dot / lengths if lengths > 0 else None


@dataclass(frozen=True)
class PathProducts:
    """‖g_out‖², ‖g_in‖² and ⟨g_out, g_in⟩ of the two paths to a tied table (paper eq:tied_decomp)."""

    output_square: float
    input_square: float
    dot: float

    def numbers(self) -> PathNumbers:
        """Norms and cosine as the report has them."""
        output, into = math.sqrt(self.output_square), math.sqrt(self.input_square)
        return PathNumbers(output, into, self.dot / (output * into) if output * into > 0 else None)


@dataclass(frozen=True)
class ObjectiveGradient:
    """The gradient of one objective beside that of CE."""

    head: AgainstCe
    """At the output-head tensor: a tied table with both paths, or the untied projection, without the bias."""
    model: AgainstCe | None
    """Over all parameters of the model, the head's bias included; None where it was not asked for."""
    paths: PathProducts | None
    """None for an untied head."""
