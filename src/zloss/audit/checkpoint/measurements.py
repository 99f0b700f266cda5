"""Everything an audit measured, before it becomes a report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from zloss.audit.checkpoint.clock import Clock
from zloss.audit.checkpoint.config import AuditConfig
from zloss.measure.diagnostic_gradients import DiagnosticGradients
from zloss.measure.measurement import Measurement
from zloss.measure.tails import Tails
from zloss.models.checkpoint import Checkpoint
from zloss.results.router import RouterFindings
from zloss.text.blocks import Blocks
from zloss.text.corpus import Corpus


@dataclass(frozen=True)
class AuditMeasurements:
    """One audit, complete or interrupted."""

    config: AuditConfig
    checkpoint: Checkpoint
    corpus: Corpus
    blocks: Blocks
    measurement: Measurement
    agreement: float
    """Relative difference between our logits and the model's own."""
    tails: Tails
    finished_blocks: int
    gradient: DiagnosticGradients | None
    router: RouterFindings | None
    """The findings of the routers; None for a dense model."""
    complete: bool
    """False after Ctrl-C."""
    clock: Clock
    started: datetime
    command: str
    notes: tuple[str, ...] = ()
    """Sentences on how the text was cut."""

    @property
    def gradient_blocks(self) -> int:
        """Blocks of the diagnostic batch."""
        return min(self.config.gradient_blocks, self.blocks.count)
