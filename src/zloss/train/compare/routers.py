"""Router variants side by side: scale, what their routers did, and how far their training losses are from the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zloss.results.moe_config import OFF
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.trajectory import trajectory

if TYPE_CHECKING:
    from zloss.train.compare.comparison import Pairing


def router_section(pairings: Sequence[Pairing], by_seed: Mapping[int, FinishedRun]) -> dict[str, Any]:
    """Every router variant: its scale, what its routers did, seed by seed, and how far its losses are from the baseline's."""
    base = next(iter(by_seed.values())).method
    return {
        "baseline": base,
        "conventions": [_router_variant(pairing) for pairing in pairings if pairing.runs[0].method != OFF],
        "off": [_router_variant(pairing) for pairing in pairings if pairing.runs[0].method == OFF],
    }


def _router_variant(pairing: Pairing) -> dict[str, Any]:
    metrics = [run.metrics for run in pairing.runs]
    router = metrics[0].get("router", {})
    apart = [trajectory(base, run) for base, run in pairing.pairs]
    return {
        "convention": pairing.method,
        "coef": pairing.coef,
        "applied_coef": router.get("applied_coef"),
        "s_rel": metrics[0].get("s_rel"),
        "absolute": metrics[0].get("router_absolute"),
        "seeds": [run.seed for run in pairing.runs],
        **{key: [m.get(key) for m in metrics] for key in ("ce", "entropy", "load_cv", "load_balance")},
        "max_loss_difference": [part["max_loss_difference"] for part in apart],
        "first_difference": [part["first_difference"] for part in apart],
    }
