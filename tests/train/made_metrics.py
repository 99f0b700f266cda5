"""Metrics of a run whose model was not measured: the endpoints of its steps, everything else None."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.optimizer.endpoints import endpoints
from zloss.results.audit import HeadNumbers, Heads, Nonfinite
from zloss.results.run_metrics import RunGradients, RunMetrics
from zloss.results.steps import StepRecord


def metrics_of(records: Sequence[StepRecord], *, seed: int = 1) -> RunMetrics:
    """metrics.json of a CE run with these steps."""
    return RunMetrics(
        method="ce",
        coef=0.0,
        seed=seed,
        ppl=None,
        ce=None,
        coordinate="raw",
        diag_coef=1e-4,
        diag_z=None,
        p_z_999=None,
        a_p_99=None,
        mu_abs_99=None,
        training=endpoints(records, clip=1.0),
        gradients=RunGradients(r_aux=None, c_aux=None, tied_paths=None, gradient=None, diagnostic_tied_paths=None),
        tokens_consumed=1,
        tokens_available=1,
        reuse=1.0,
        valid_predictions=0,
        valid_nonfinite=Nonfinite(),
        heads=Heads(HeadNumbers()),
    )
