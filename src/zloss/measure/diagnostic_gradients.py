"""R_Z, C_Z and the tied paths of the diagnostic Z-loss λ_diag(log Z − c)², in raw and centered coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field

from zloss.console import Progress
from zloss.measure.diagnostic_batch import DiagnosticBatch
from zloss.measure.gradient_engine import objective_gradients
from zloss.measure.gradient_products import AgainstCe
from zloss.measure.measurement import Measurement
from zloss.models.checkpoint import Checkpoint
from zloss.objectives import CenteredZLoss, Objective, StandardZLoss
from zloss.results.gradient_numbers import GradientNumbers, PathNumbers

RAW, CENTERED = "z", "centered_z"


@dataclass(frozen=True)
class DiagnosticGradients:
    """Ratios and cosines of the diagnostic batch; what does not exist is None."""

    raw: GradientNumbers
    centered: GradientNumbers
    whole_model: GradientNumbers
    """Over all parameters, in raw coordinates."""
    paths: dict[str, PathNumbers] = field(default_factory=dict)
    """By coordinate; empty for an untied head."""
    norms: dict[str, float] = field(default_factory=dict)
    """Frobenius norms, mean-reduced: ce, z, centered_z at the head tensor, ce_model and z_model over all parameters."""


def diagnostic_gradients(
    checkpoint: Checkpoint, measurement: Measurement, batch: DiagnosticBatch, progress: Progress | None = None
) -> DiagnosticGradients:
    """All numbers on one batch; the whole model in raw coordinates only."""
    objectives: dict[str, Objective] = {RAW: StandardZLoss(measurement.coef, measurement.target)}
    if measurement.lacks_centered is None:
        objectives[CENTERED] = CenteredZLoss(measurement.coef, measurement.target)
    found = objective_gradients(checkpoint, measurement, batch, objectives, whole_model=(RAW,), progress=progress)
    whole = found[RAW].model
    assert whole is not None
    norms = {"ce": found[RAW].head.ce_norm, "ce_model": whole.ce_norm, "z_model": whole.norm}
    return DiagnosticGradients(
        raw=_numbers(found[RAW].head),
        centered=_numbers(found[CENTERED].head) if CENTERED in found else GradientNumbers(),
        whole_model=_numbers(whole),
        paths={
            coordinate: paths.numbers()
            for name, coordinate in ((RAW, "raw"), (CENTERED, "centered"))
            if name in found and (paths := found[name].paths) is not None
        },
        norms=norms | {name: gradient.head.norm for name, gradient in found.items()},
    )


def _numbers(products: AgainstCe) -> GradientNumbers:
    return GradientNumbers(r_z=products.ratio, c_z=products.cosine)
