"""Legend of the table of router conventions."""

from __future__ import annotations

from zloss.results.quantities import BY_KEY
from zloss.results.router_scale import RouterScaleTable


def router_scale_legend(scales: RouterScaleTable) -> list[tuple[str, str]]:
    """(column, what it holds)."""
    relative, absolute = BY_KEY["s_rel"].meaning, BY_KEY["router_absolute"].meaning
    legend = [
        ("s_rel", f"{relative}; 1 under {scales.conventions[0].convention}"),
        ("λα", f"{absolute}, with T = {scales.tokens} tokens in each of L = {scales.layers} layers"),
        ("equal λ_R", f"the coefficient that applies what {scales.coef:g} applies under {scales.source}"),
    ]
    legend.append(
        (
            "c_R",
            "the target of log Z_R is no part of the scale. Most codebases have 0, and `zloss.router_loss` has log E: with a "
            "coefficient of theirs pass target=0.0",
        )
    )
    if not all(scale.uniform for scale in scales.conventions):
        legend.append(("(mean)", "layers have different scales; this is the mean over routing decisions"))
    return legend
