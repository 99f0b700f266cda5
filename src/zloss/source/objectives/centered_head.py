"""The gauge-only control of the paper: row-centered deployment, no auxiliary loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zloss.source.objective import Coordinate
from zloss.source.objectives.cross_entropy import CrossEntropy


@dataclass(frozen=True)
class CenteredHead(CrossEntropy):
    """Cross-entropy on row-centered logits z − μ1.

    A common shift changes neither CE nor its gradient, so training equals `CrossEntropy` bit for bit; only the deployed
    coordinate, in which Z-loss metrics are read, differs.

    >>> CenteredHead().active, CenteredHead().coordinate
    (False, 'centered')
    """

    name: ClassVar[str] = "centered-head"
    coordinate: ClassVar[Coordinate] = "centered"
