"""The record of an identification: the probes, what came back, and the objective that explains it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zloss.audit.loss.callable import probe_width
from zloss.audit.loss.denominator import Denominators
from zloss.audit.loss.describe import cannot_tell
from zloss.audit.loss.ignored_class import SpecialClass
from zloss.audit.loss.measured import Measured
from zloss.audit.loss.model import Model
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.select import COARSE, Selection
from zloss.results.loss_audit import Identified


@dataclass(frozen=True)
class Second:
    """A second, independent draw of the probes, and what came back (finite answers only)."""

    seed: int
    probes: dict[str, Probe]
    outcomes: dict[str, Outcome]


@dataclass(frozen=True)
class WeighedOn:
    """The tokens from which the denominators were read, and the unit roundoff to which they can be."""

    rows: Probe
    rounding: float


@dataclass(frozen=True)
class Identification:
    """Everything the findings need: the probes, what came back, the chosen penalty, and the model built from it."""

    space: Space
    dtype: torch.dtype
    eps: float
    probes: dict[str, Probe]
    outcomes: dict[str, Outcome]
    """Only finite ones; a probe missing here gave NaN or Inf."""
    data: Measured
    selection: Selection
    denominators: Denominators
    model: Model
    identified: Identified
    weighed_on: WeighedOn | None = None
    special: tuple[SpecialClass, ...] = ()
    """Classes with a weight of their own, which no probe has as a target; of a loss that treats all others alike."""
    second: Second | None = None
    """The second draw."""
    kept_state: str | None = None
    """In one sentence, what the loss keeps between calls, where that was seen."""
    scale_power: float = 0.0
    """k of a linear loss whose logit scale follows D^k; the model holds it for the width of the probes."""
    targets_unused: bool = False
    """Whether the loss is a function of the logits alone."""

    @property
    def told(self) -> bool:
        """Whether it could be told what the loss applies."""
        return self.identified.has_z is not None and self.identified.reason is None

    @property
    def trusted(self) -> bool:
        """Whether the model predicts gradients on new logits: token weights and corners of other forms are not known there."""
        known = self.selection.how in ("none", "explained", "filtered", "moderate_only")
        form = any(c.name == "form" for c in self.selection.fit.candidates)
        alike = self.identified.ce_weights in ("uniform", "groups") or bool(self.special)
        return self.told and known and not form and alike

    @property
    def plain(self) -> bool:
        """Whether the model holds for every head: trusted, whole, in more than 16 bits, and without a gain."""
        whole = self.selection.how in ("none", "explained") and self.selection.fit.damping is None
        return self.trusted and whole and not self.coarse

    def model_at(self, width: int) -> Model:
        """The model of a linear loss at another width D of its head."""
        if self.scale_power == 0.0:
            return self.model
        factor = (width / probe_width(self.space.tokens, self.space.width)) ** self.scale_power
        return replace(self.model, warp=replace(self.model.warp, scale=self.model.warp.scale * factor))

    @property
    def coarse(self) -> bool:
        return self.eps > COARSE


def unexplained(ident: Identification, reason: str) -> Identification:
    """The same where nothing can be told, for `reason`."""
    got = ident.identified
    told = cannot_tell(reason, got.computes_in, ident.space, targets=got.targets)
    return replace(ident, identified=told, selection=Selection("unexplained", ident.selection.fit))
