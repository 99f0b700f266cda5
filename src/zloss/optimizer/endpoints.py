"""Endpoints of a run from its step records: tails, event rates, Adam state (paper app:endpoints), and fp16 headroom.

G_99 = Q_0.99 ‖g_s‖₂, H_99 = Q_0.99 ‖g_s‖∞, ρ_99 = Q_0.99 ‖g_s‖₂/(‖θ_s‖₂ + ε) before clipping, over steps with a finite
gradient. Φ_τ and the clip rate are fractions of all steps with ‖g_s‖₂ > threshold; a nonfinite step counts as an event.
Quantiles interpolate linearly between order statistics. `zloss.results.steps` defines every key.

The fp16 headroom is how far a static loss scale can go before fp16 overflows: κ_max, κ_min and Ψ_κ (paper
eq:overflow_proxy). It needs only ‖g‖_∞ of each gradient; NaN or infinity overflows at every scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from zloss.errors import InputError
from zloss.results.steps import PHI, StepEndpoints, StepRecord

THRESHOLDS = (10.0, 50.0, 100.0)
"""The paper's thresholds τ of Φ_τ."""
SPIKE = 0.5
"""A step-to-step rise of the training loss that counts as a spike, in nats per token (ours: the paper states none)."""
LEVELS = {"p99": 0.99, "p999": 0.999, "max": 1.0}
"""Suffix of an endpoint → quantile over the steps."""
TINY = float(np.finfo(np.float32).tiny)
"""Added to ‖θ‖₂ in a denominator, so that an all-zero model does not divide by zero."""


def endpoints(
    records: Sequence[StepRecord],
    *,
    clip: float | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    spike: float = SPIKE,
) -> StepEndpoints:
    """Every endpoint of a sequence of steps; None if no step contributes.

    `clip` is the clipping threshold, `thresholds` are the τ of Φ_τ, `spike` is a rise of the loss in nats per token.
    """
    bad = [record.gradient != "finite" for record in records]
    samples = [record.adam for record in records if record.adam is not None]
    micro = sum(record.micro_batches for record in records)
    nan, inf = sum(record.micro_nan for record in records), sum(record.micro_inf for record in records)

    def rate_above(threshold: float) -> float | None:
        return _fraction(
            nonfinite or record.grad_norm > threshold for nonfinite, record in zip(bad, records, strict=True)
        )

    return StepEndpoints(
        steps=len(records),
        **_tail("grad_norm", (r.grad_norm for r in records)),
        **_tail("grad_inf", (r.grad_inf for r in records)),
        **_tail("grad_param_ratio", (r.grad_norm / (r.param_norm + TINY) for r in records)),
        **_tail("postclip_norm", (r.postclip_norm for r in records)),
        **_tail("postclip_inf", (r.postclip_inf for r in records)),
        **_tail("postclip_param_ratio", (r.postclip_norm / (r.param_norm + TINY) for r in records)),
        clip_rate=None if clip is None else rate_above(clip),
        phi={f"{PHI}{threshold:g}": rate_above(threshold) for threshold in thresholds},
        nonfinite_gradient=_fraction(bad),
        nonfinite_gradient_nan=_fraction(record.gradient == "nan" for record in records),
        nonfinite_gradient_inf=_fraction(record.gradient == "inf" for record in records),
        skipped_updates=sum(not record.updated for record in records),
        nonfinite_microbatch=(nan + inf) / micro if micro else None,
        nonfinite_microbatch_nan=nan / micro if micro else None,
        nonfinite_microbatch_inf=inf / micro if micro else None,
        **_tail("loss", (record.loss for record in records)),
        **_tail("train_ce", (record.cross_entropy for record in records)),
        spike_rate=spike_rate([record.loss for record in records], spike),
        adam_samples=len(samples),
        **_tail("adam_v", (sample.v_inf for sample in samples), ("p99", "max")),
        **_tail("adam_d_inf", (s.d_inf for s in samples), ("p99",)),
        **_tail("adam_d_ratio", (s.d_norm / (s.param_norm + TINY) for s in samples), ("p99",)),
        **_tail("adam_corrected_d_inf", (s.corrected_d_inf for s in samples), ("p99",)),
        **_tail("adam_corrected_d_ratio", (s.corrected_d_norm / (s.param_norm + TINY) for s in samples), ("p99",)),
    )


def spike_rate(losses: Sequence[float], spike: float = SPIKE) -> float | None:
    """Fraction of steps with L_s − L_{s−1} > spike, from the second step on; a nonfinite L_s counts as a spike."""
    return _fraction(not math.isfinite(now) or now - before > spike for before, now in itertools.pairwise(losses))


def _tail(name: str, values: Iterable[float], kinds: Sequence[str] = tuple(LEVELS)) -> dict[str, Any]:
    """p99, p99.9 and maximum over the finite values, or those of `kinds`, by key."""
    array = np.fromiter(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    return {f"{name}_{kind}": float(np.quantile(finite, LEVELS[kind])) if finite.size else None for kind in kinds}


def _fraction(events: Iterable[bool]) -> float | None:
    marks = list(events)
    return sum(marks) / len(marks) if marks else None


FP16_MAX = 65504.0
"""M_16, the largest finite fp16 number."""
STATIC_SCALES = (256, 1024, 4096, 16384, 65536)
"""The scales the paper audits."""


def max_safe_scale(grad_inf: float) -> float:
    """κ_max = M_16 / ‖g‖_∞, the largest safe static scale; 0 for a nonfinite gradient, inf for a zero gradient.

    >>> max_safe_scale(5.77), max_safe_scale(float("nan"))
    (11352.51..., 0.0)
    """
    if not math.isfinite(grad_inf):
        return 0.0
    return FP16_MAX / grad_inf if grad_inf > 0 else math.inf


def overflows(grad_inf: float, scale: float) -> bool:
    """κ‖g‖_∞ > M_16, strictly, or a nonfinite gradient."""
    return not math.isfinite(grad_inf) or scale * grad_inf > FP16_MAX


def fp16_margin(grad_infs: Sequence[float], scales: Sequence[int]) -> tuple[float, dict[str, float]]:
    """(κ_min, Ψ_κ by `psi_κ`) over batches, from the ‖g‖_∞ of the gradient of each.

    κ_min is the smallest κ_max; Ψ_κ is the fraction of batches whose gradient, scaled by κ, leaves the fp16 range.
    """
    if not grad_infs:
        raise InputError("an fp16 margin needs the gradient of at least one batch, but got none.")
    psi = {f"psi_{scale}": sum(overflows(value, scale) for value in grad_infs) / len(grad_infs) for scale in scales}
    return min(map(max_safe_scale, grad_infs)), psi
