"""The tables of docs/coming_from.md: `zloss.explain` and the router conventions, framework by framework."""

from __future__ import annotations

import zloss
from tools.docs.markdown import sentence, table
from zloss.router.conventions import router_conventions

COEF, LAYERS, TOP_K = 1e-3, 16, 8


def heads() -> str:
    """One line per framework: its setting for λ = 1e-4, what it is here, its denominator."""
    found = zloss.explain(zloss.StandardZLoss(1e-4, target=0.0), vocab=50_304)
    lines = []
    for recipe in found.recipes:
        setting = f"`{recipe.setting}`" if recipe.setting else "none"
        ours = "`zloss.StandardZLoss(1e-4, target=0.0)`" if recipe.setting else "[routers](#routers)"
        lines.append((recipe.framework, setting, ours, sentence(recipe.note)))
    return table(("framework", "setting there", "the same here", "denominator there"), lines)


def routers() -> str:
    """One line per convention: s_rel, and the coefficient that equals 1e-3 of the token-layer mean."""
    lines = []
    for name in (convention.name for convention in router_conventions()):
        scale = zloss.router_scale(name, layers=LAYERS, tokens=4096, top_k=TOP_K, coef=COEF)
        equal = (
            zloss.match_coefficient(COEF, "token_layer_mean", name, layers=LAYERS, top_k=TOP_K)
            if scale.relative
            else None
        )
        lines.append((f"`{name}`", f"{scale.relative:g}", "none" if equal is None else f"{equal:.4g}"))
    return table(("convention", "s_rel:", "λ_R that equals 1e-3 of `token_layer_mean`:"), lines)
