"""R_aux, C_aux and the two paths of a tied table for the objective that was trained, on a diagnostic batch.

R_aux = ‖g_aux‖/‖g_CE‖ and C_aux = cos(g_aux, g_CE) at the output-head tensor (a tied table with both paths).
"""

from __future__ import annotations

from dataclasses import dataclass

from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.gradient_engine import objective_gradients
from zloss.measure.measurement import Measurement
from zloss.models.checkpoint import Checkpoint
from zloss.objectives import Objective
from zloss.results.gradient_numbers import PathNumbers


@dataclass(frozen=True)
class AuxiliaryGradient:
    """Scaling: mean over the predictions of the batch, the coefficient included."""

    r_aux: float | None
    c_aux: float | None
    paths: PathNumbers | None
    """None for an untied head, or where the objective is off."""


def auxiliary_gradient(
    checkpoint: Checkpoint, measurement: Measurement, objective: Objective, batch: DiagnosticBatch
) -> AuxiliaryGradient:
    """The numbers of one batch; an objective that is off has R_aux 0 and no direction."""
    if not objective.active:
        return AuxiliaryGradient(0.0, None, None)
    found = objective_gradients(checkpoint, measurement, batch, {"aux": objective})["aux"]
    paths = None if found.paths is None else found.paths.numbers()
    return AuxiliaryGradient(found.head.ratio, found.head.cosine, paths)
