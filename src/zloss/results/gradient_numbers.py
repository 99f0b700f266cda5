"""Gradients of CE and Z on a diagnostic batch, and their split by path, as `report.json` and `metrics.json` have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zloss.results.record import COSINE, NOT_NEGATIVE

NO_INPUT_PATH = "the head is untied: no input path leads to its gradient"


@dataclass(frozen=True)
class GradientNumbers:
    """R_Z = ‖g_Z‖/‖g_CE‖ and C_Z = cos(g_Z, g_CE)."""

    r_z: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """Norm of the Z gradient relative to the CE gradient."""
    c_z: float | None = field(default=None, metadata=COSINE)
    """Cosine between the two gradients."""


@dataclass(frozen=True)
class GradientInfo:
    """Gradients of CE and of Z on a diagnostic batch, both mean-reduced over its predictions."""

    coef: float
    """λ of the Z term."""
    blocks: int
    """Blocks of the diagnostic batch, the first of the text."""
    raw: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on raw logits, gradient of the head."""
    centered: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on row-centered logits, gradient of the head."""
    whole_model: GradientNumbers = field(default_factory=GradientNumbers)
    """Z on raw logits, gradient of all parameters."""
    scope: str = "output_head"
    """The tensor of `raw` and `centered`: the tied table with both paths, or the untied projection."""
    reduction: str = "mean"
    """How tokens are reduced, for CE and Z alike."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further facts: the norms."""


@dataclass(frozen=True)
class PathNumbers:
    """The Z gradient of a tied table split by path: through the output logits, through the input embedding."""

    output_norm: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g‖₂ through the output logits."""
    input_norm: float | None = field(default=None, metadata=NOT_NEGATIVE)
    """‖g‖₂ through the input embedding."""
    cosine: float | None = field(default=None, metadata=COSINE)
    """Cosine between the two."""


@dataclass(frozen=True)
class TiedPaths:
    """The split in both coordinates."""

    raw: PathNumbers = field(default_factory=PathNumbers)
    """Z on raw logits."""
    centered: PathNumbers = field(default_factory=PathNumbers)
    """Z on row-centered logits."""
