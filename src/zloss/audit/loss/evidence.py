"""What the findings look at: the audited loss, its relatives, and what was identified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zloss.audit.loss.callable import BlackBox, Outcome
from zloss.audit.loss.identify import Identification
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe
from zloss.results.loss_audit import Finding, SourceError

NO_Z = "The loss has no Z."


@dataclass(frozen=True)
class Evidence:
    """Inputs of every check. `off` and `per_token` are None where the caller gave none."""

    box: BlackBox
    off: BlackBox | None
    per_token: BlackBox | None
    expect: dict[str, Any]
    ident: Identification
    source: SourceError
    floor: float
    """The `delta_src` that fp32 rounding of the total gradient alone can cause on the audited logits."""
    seed: int

    def call(self, probe: Probe, *, dtype: torch.dtype | None = None, **options: Any) -> Outcome:
        """Call the audited loss on a probe, by default in the dtype of the identification."""
        return self.box(probe.logits_TV, probe.target_T, dtype=dtype or self.ident.dtype, **options)

    def attempt(self, probe: Probe, **options: Any) -> Outcome | str:
        """The outcome, or the sentence in which the loss failed."""
        try:
            return self.call(probe, **options)
        except LossCallError as error:
            return str(error)


Check = Callable[[Evidence], Finding]


def passed(id: str, sentence: str, figure: float | None = None) -> Finding:
    return Finding(id, "pass", sentence, figure)


def found(id: str, sentence: str, figure: float | None = None) -> Finding:
    return Finding(id, "finding", sentence, figure)


def not_applicable(id: str, sentence: str, figure: float | None = None) -> Finding:
    return Finding(id, "not_applicable", sentence, figure)
