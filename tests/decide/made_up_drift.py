"""Finished checkpoints with made-up numbers: CE and tails by block, without any model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zloss.decide.drift import DriftLimits, evaluate_drift
from zloss.results.drift import Drift, DriftCheckpoint, DriftNumbers, KeptCheckpoint
from zloss.results.provenance import Provenance
from zloss.results.run_metrics import ValidationBlocks

BLOCKS, SIZE = 16, 100


def kept(step: int, *, ce: float = 3.0, shift: float = 2.0, sigma: float = 5.0, seed: int = 0) -> KeptCheckpoint:
    """A checkpoint whose |μ| is spread about `shift`; blocks of all checkpoints have the same spread."""
    rng = np.random.default_rng(0)
    own = np.random.default_rng(1000 + seed)
    ce_B = ce + rng.normal(0, 0.3, BLOCKS) + own.normal(0, 1e-4, BLOCKS)
    mu_BT = shift * np.exp(rng.normal(0, 0.2, (BLOCKS, SIZE)))
    gain_BT = 3 + rng.random((BLOCKS, SIZE))
    numbers = DriftNumbers(
        mu_abs_99=float(np.quantile(mu_BT, 0.99)),
        mu_rms=float(np.sqrt((mu_BT**2).mean())),
        p_z_999=float(np.quantile(mu_BT, 0.999)),
        a_p_99=float(np.quantile(gain_BT, 0.99)),
        sigma_1=sigma,
        e_1=0.2,
        r_z=0.03,
    )
    centered = DriftNumbers(1e-7, 1e-7, 4.0, 3.9, 4.0, 0.1, 0.02)
    tails = {
        "shift.raw": _tuples(mu_BT),
        "violation.raw": _tuples(mu_BT),
        "violation.centered": _tuples(gain_BT),
        "gain.raw": _tuples(gain_BT),
        "gain.centered": _tuples(gain_BT),
    }
    blocks = ValidationBlocks(
        tokens=(SIZE,) * BLOCKS,
        ce=tuple(map(float, ce_B)),
        kept=BLOCKS * SIZE,
        tails=tails,
        means={"shift_squared.raw": tuple(map(float, (mu_BT**2).mean(axis=1)))},
    )
    mean = float(ce_B.mean())
    checkpoint = DriftCheckpoint(
        f"checkpoint-{step}", step, f"{step:016d}", 512, 32, mean, float(np.exp(mean)), numbers, centered
    )
    return KeptCheckpoint(f"identity-{step}", "tokens", "made up", checkpoint, blocks)


def made_up_run(shifts: Sequence[float], ces: Sequence[float] | None = None, **options: float) -> list[KeptCheckpoint]:
    ces = ces or [3.0] * len(shifts)
    return [
        kept(100 * (i + 1), ce=ce, shift=shift, seed=i, **options)
        for i, (shift, ce) in enumerate(zip(shifts, ces, strict=True))
    ]


def evaluated(run: Sequence[KeptCheckpoint], limits: DriftLimits | None = None) -> Drift:
    """The whole record of finished checkpoints."""
    provenance = Provenance(
        zloss="1", torch="2", command="zloss drift", started="2026-01-01T00:00:00+00:00", seconds=1.5
    )
    return evaluate_drift(run, limits, model="made-up run", provenance=provenance)


def made_up_drift(shifts: Sequence[float], ces: Sequence[float] | None = None) -> Drift:
    """The whole record of a made-up run."""
    return evaluated(made_up_run(shifts, ces))


def _tuples(values_BT: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(sorted(map(float, row), reverse=True)) for row in values_BT)
