"""Transport telemetry of a step from the statistics its loss returned: P_Z, A_p and μ tails over the step's tokens.

P_Z and A_p are in the coordinate that the method deploys, and P_Z is taken against c = log V whatever the target of the
objective is. The numbers reach the host in one transfer per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zloss.source.objective import Objective
from zloss.source.statistics import TokenStats

LEVELS = {"p_z_999": 0.999, "a_p_99": 0.99, "mu_abs_99": 0.99}
"""Key in `StepRecord.telemetry` → level of its quantile over tokens."""


@torch.no_grad()
def transport_tails(
    stats: Sequence[TokenStats], objective: Objective, *, deployed: bool = False
) -> dict[str, float | None]:
    """p99.9 |log Z − log V|, p99 A_p and p99 |μ| over the valid tokens of all micro-batches; None where it does not exist.

    `deployed`: the statistics are of logits that are already centered (the paper's path), so log Z needs no shift.
    """
    centered = objective.coordinate == "centered"
    values: dict[str, list[Tensor]] = {name: [] for name in LEVELS}
    for part in stats:
        valid = part.valid
        log_z = part.log_z_centered if centered and not deployed else part.log_z
        gain = part.gain_centered if centered else part.gain
        if log_z is not None:
            values["p_z_999"].append((log_z - math.log(part.vocab)).abs()[valid])
        if gain is not None:
            values["a_p_99"].append(gain[valid])
        if part.mu is not None:
            values["mu_abs_99"].append(part.mu.abs()[valid])
    found = {name: exact_quantile(torch.cat(parts), LEVELS[name]) for name, parts in values.items() if parts}
    if not found:
        return dict.fromkeys(LEVELS)
    numbers = torch.stack(list(found.values())).tolist()
    return dict.fromkeys(LEVELS) | dict(zip(found, (n if math.isfinite(n) else None for n in numbers), strict=True))


def exact_quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile in fp64, interpolated linearly between order statistics; NaN of nothing.

    `torch.quantile` refuses more than 2²⁴ values.
    """
    ordered = values.flatten().double().sort().values
    if not ordered.numel():
        return values.new_tensor(math.nan).double()
    position = q * (ordered.numel() - 1)
    low = math.floor(position)
    high = min(low + 1, ordered.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)
