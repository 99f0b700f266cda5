"""How far two matched runs are apart, step by step."""

from __future__ import annotations

import math
import statistics

from zloss.results.comparison import Trajectory
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.step_log import read_steps


def trajectory(base: FinishedRun, run: FinishedRun) -> Trajectory:
    """The differences of their training losses and CE."""
    pairs = list(zip(read_steps(base.folder), read_steps(run.folder), strict=False))
    gaps = [abs(a.cross_entropy - b.cross_entropy) for a, b in pairs]
    apart = next((a.step for a, b in pairs if (a.cross_entropy, a.grad_norm) != (b.cross_entropy, b.grad_norm)), None)
    finite = [gap for gap in gaps if math.isfinite(gap)]
    losses = [abs(a.loss - b.loss) for a, b in pairs]
    return Trajectory(
        seed=run.seed,
        steps=len(pairs),
        first_difference=apart,
        max_loss_difference=max(losses, default=None) if all(map(math.isfinite, losses)) else None,
        max_ce_difference=max(finite, default=None),
        mean_ce_difference=statistics.fmean(finite) if finite else None,
    )
