"""One router coefficient under every convention of the catalog. No torch here."""

from __future__ import annotations

from typing import Any

from zloss.results.router_scale import ConventionScale, RouterScaleTable
from zloss.source.router.catalog import find_convention, router_conventions
from zloss.source.router.convention import RouterConvention
from zloss.source.router.scale import match_coefficient, router_scale


def router_scale_table(
    coef: float,
    source: str | RouterConvention,
    *,
    layers: int,
    top_k: int,
    tokens: int,
    model_layers: int | None = None,
    encoder_layers: int | None = None,
    valid_tokens: int | None = None,
    micro_batches: int = 1,
) -> RouterScaleTable:
    """The scale of `coef` under every convention, and the coefficient there that equals `coef` under `source`.

    A `source` of one's own stands behind those of the catalog.
    """
    context: dict[str, Any] = {
        "layers": layers,
        "top_k": top_k,
        "tokens": tokens,
        "model_layers": model_layers,
        "encoder_layers": encoder_layers,
        "valid_tokens": valid_tokens,
        "micro_batches": micro_batches,
    }
    meant = find_convention(source)
    scales = []
    catalog = router_conventions()
    for convention in catalog if meant in catalog else (*catalog, meant):
        scale = router_scale(convention, coef=coef, **context)
        scales.append(
            ConventionScale(
                convention=convention.name,
                relative=scale.relative,
                absolute=scale.absolute,
                uniform=scale.uniform,
                equal_coef=None if scale.relative == 0 else match_coefficient(coef, meant, convention, **context),
                cited=convention.cited,
            )
        )
    return RouterScaleTable(coef=coef, source=meant.name, conventions=tuple(scales), **context)
