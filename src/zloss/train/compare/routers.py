"""Router variants side by side: scale, what their routers did, and how far their training losses are from the baseline's."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.results.moe_config import OFF
from zloss.results.router_variants import RouterVariant, RouterVariants
from zloss.train.compare.pairing import Pairing
from zloss.train.compare.trajectory import trajectory


def router_section(pairings: Sequence[Pairing], baseline: str) -> RouterVariants:
    """Every router variant; `baseline` is the name of the one they are compared with."""
    # Matched runs share everything but the router loss, so the first run speaks for all.
    shared = pairings[0].runs[0].metrics.get("router", {})
    return RouterVariants(
        baseline=baseline,
        conventions=tuple(_router_variant(pairing) for pairing in pairings if pairing.method != OFF),
        off=tuple(_router_variant(pairing) for pairing in pairings if pairing.method == OFF),
        top_k=shared.get("top_k"),
        decisions=shared.get("decisions"),
    )


def _router_variant(pairing: Pairing) -> RouterVariant:
    metrics = [run.metrics for run in pairing.runs]
    apart = [trajectory(base, run) for base, run in pairing.pairs]

    def by_seed(key: str) -> tuple[float | None, ...]:
        return tuple(m.get(key) for m in metrics)

    return RouterVariant(
        convention=pairing.method,
        coef=pairing.coef,
        applied_coef=metrics[0].get("router", {}).get("applied_coef"),
        s_rel=metrics[0].get("s_rel"),
        absolute=metrics[0].get("router_absolute"),
        seeds=tuple(run.seed for run in pairing.runs),
        ce=by_seed("ce"),
        entropy=by_seed("entropy"),
        load_cv=by_seed("load_cv"),
        load_balance=by_seed("load_balance"),
        max_loss_difference=tuple(part.max_loss_difference for part in apart),
        first_difference=tuple(part.first_difference for part in apart),
    )
