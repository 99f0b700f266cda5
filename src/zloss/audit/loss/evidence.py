"""What the findings look at: the audited loss, its relatives, and what was identified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe
from zloss.audit.loss.reach import SizeTried
from zloss.audit.loss.returned import Returned, recognise, reported_z
from zloss.audit.loss.severity import SEVERITY
from zloss.results.loss_audit import Finding, SourceError

NO_Z = "The loss has no Z."
UNSTABLE = "The same inputs give different answers, so calls cannot be compared: see not_repeatable."
CANNOT_TELL = "What the loss applies could not be identified: see unexplained_source."


def no_z(evidence: Evidence) -> str | None:
    """Why a question about the Z cannot be asked; None where there is a Z."""
    has_z = evidence.ident.identified.has_z
    if has_z is None:
        return CANNOT_TELL
    return None if has_z else NO_Z


def no_known_z(evidence: Evidence) -> str | None:
    """Why a question about the form of the Z cannot be asked; None where its numbers are known."""
    if (why := no_z(evidence)) is not None:
        return why
    return None if evidence.ident.told else CANNOT_TELL


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
    reach: tuple[SizeTried, ...] = ()
    """What larger sizes gave."""
    given: bool = False
    """Whether the audited logits are the caller's, so that there is one draw of them."""
    stable: bool = True
    """False where the same inputs gave another answer: then calls cannot be compared with each other."""

    @cached_property
    def returned(self) -> tuple[Returned, ...]:
        """What the loss returns beside itself."""
        return recognise(self.ident, self.expect.get("target"), self._masked)

    @property
    def _masked(self) -> tuple[Probe, Outcome] | None:
        """An ordinary batch with part of its tokens ignored; None where its value cannot be predicted or nothing is reported."""
        ident = self.ident
        counts = ident.denominators
        known = ident.trusted and counts.masks_accepted and counts.named and ident.identified.ce_weights != "groups"
        if not known or not ident.outcomes["mixed"].reported:
            return None
        keep = torch.rand(ident.space.tokens, generator=torch.Generator().manual_seed(self.seed + 7)) < 0.5
        probe = ident.probes["mixed"].masked(keep)
        outcome = self.attempt(probe)
        return None if isinstance(outcome, str) or not outcome.finite else (probe, outcome)

    @property
    def reported(self) -> Returned | None:
        """The Z among them."""
        return reported_z(self.returned)

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
    return Finding(id, "finding", sentence, figure, SEVERITY[id])


def not_applicable(id: str, sentence: str, figure: float | None = None) -> Finding:
    return Finding(id, "not_applicable", sentence, figure)
