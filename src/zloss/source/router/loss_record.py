"""What a router Z-loss returns: the loss, and what it applies to each decision.

Axes: L layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from zloss.source.router.convention import RouterConvention
from zloss.source.router.statistics import RouterStats


@dataclass(frozen=True)
class RouterLoss:
    """The router Z-loss of one forward pass, with what it applies to each decision. Only `loss` carries a gradient."""

    loss: Tensor
    """λ Σ α (log Z − c)²; 0 when off or when nothing is counted. With `groups` this rank's part times the divisor of the
    gradients: its mean over ranks is the loss of all decisions where gradients are averaged, its sum where they are
    summed."""
    per_layer: Tensor
    """Each layer's part of `loss`, [L]."""
    alpha_per_layer: Tensor
    """α_l, fp64 [L]; 0 for a layer without counted tokens. With `groups` that of a decision among those of all ranks."""
    absolute_per_layer: Tensor
    """λ_R·α_l, fp64 [L]."""
    relative_per_layer: Tensor
    """s_rel = N_tl·α_l, fp64 [L]."""
    coef: float
    """λ_R; 0 when off."""
    target: float
    """c_R."""
    top_k: int
    convention: RouterConvention
    stats: RouterStats = field(repr=False)
    correction_norm_per_layer: Tensor | None = None
    """Mean ‖δ_h‖₂ = ‖λα·2(log Z − c)·W_Rᵀp‖₂ over each layer's decisions, [L]; None without the router weight."""
    dropped_per_layer: Tensor | None = None
    """Fraction of active routes beyond the capacity, [L]; None without a capacity."""

    @property
    def alpha(self) -> float:
        """α; the mean over decisions where layers differ."""
        return self._over_decisions(self.alpha_per_layer)

    @property
    def absolute(self) -> float:
        """λ_R·α, the coefficient of one decision."""
        return self._over_decisions(self.absolute_per_layer)

    @property
    def relative(self) -> float:
        """s_rel, 1 for the token-layer mean."""
        return self._over_decisions(self.relative_per_layer)

    @property
    def entropy(self) -> Tensor:
        """Mean router entropy over counted decisions, in nats."""
        return self.stats.entropy

    @property
    def load(self) -> Tensor:
        """[L, E]: active routes per expert."""
        return self.stats.load

    @property
    def load_cv(self) -> Tensor:
        """Coefficient of variation of the expert load, mean over layers."""
        return self.stats.load_cv

    @property
    def decisions(self) -> int:
        """N_tl, the counted routing decisions of this call."""
        return int(self.stats.valid.sum())

    @property
    def nonfinite(self) -> int:
        """Counted decisions whose log Z is NaN or infinite."""
        return int(self.stats.nonfinite)

    @property
    def correction_norm(self) -> Tensor | None:
        """Mean ‖δ_h‖₂ over counted decisions."""
        if self.correction_norm_per_layer is None:
            return None
        weight_L = self.stats.decisions_per_layer.to(self.correction_norm_per_layer)
        return torch.where(weight_L > 0, self.correction_norm_per_layer * weight_L, 0).sum() / weight_L.sum()

    @property
    def dropped(self) -> Tensor | None:
        """Fraction of all active routes beyond the capacity."""
        if self.dropped_per_layer is None:
            return None
        routes_L = self.load.sum(dim=1)
        return torch.where(routes_L > 0, self.dropped_per_layer * routes_L, 0).sum() / routes_L.sum()

    def _over_decisions(self, values_L: Tensor) -> float:
        count_L = self.stats.decisions_per_layer
        used = values_L[count_L > 0]
        if used.numel() == 0:
            return 0.0
        if bool((used == used[0]).all()):
            return float(used[0])
        return float((values_L * count_L).sum() / count_L.sum())
