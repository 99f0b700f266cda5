"""Statistics of routing decisions: log-normalizer, entropy, expert load. Scaling: means over counted decisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zloss.source.router.decisions import RouterInput
from zloss.statistics import TokenStats


@dataclass(frozen=True)
class RouterStats:
    """What the routers did. All tensors are detached; means over no decision at all are NaN."""

    decisions: RouterInput
    tokens: TokenStats
    """log Z and its parts per decision, as the head has them per token."""
    p_NE: Tensor
    """softmax over the experts."""
    entropy_N: Tensor
    """H = −Σ_e p_e log p_e in nats."""
    load: Tensor
    """[L, E]: active routes that each expert received from counted tokens (k per token)."""

    @property
    def log_z(self) -> Tensor:
        """log Z_R of every decision, [N], masked ones included."""
        return self.tokens.log_z

    @property
    def valid(self) -> Tensor:
        """[N], True where counted."""
        return self.tokens.valid

    @cached_property
    def decisions_per_layer(self) -> Tensor:
        """N_l, fp64."""
        return self.decisions.sum_per_layer(self.valid.double())

    @cached_property
    def entropy_per_layer(self) -> Tensor:
        """Mean entropy of each layer's counted decisions, [L]."""
        return self.mean_per_layer(self.entropy_N)

    @cached_property
    def entropy(self) -> Tensor:
        """Mean entropy over all counted decisions."""
        return self.mean(self.entropy_N)

    @cached_property
    def load_cv_per_layer(self) -> Tensor:
        """std_e(load) / mean_e(load) of each layer, the population standard deviation, [L]."""
        return self.load.std(dim=1, correction=0) / self.load.mean(dim=1)

    @cached_property
    def load_cv(self) -> Tensor:
        """Mean over layers of the load's coefficient of variation. It is taken per layer, so that imbalances of two layers
        cannot cancel."""
        return self.load_cv_per_layer.nanmean()

    @cached_property
    def nonfinite(self) -> Tensor:
        """How many counted decisions have a NaN or infinite log Z."""
        return (~torch.isfinite(self.log_z) & self.valid).sum()

    def dropped_per_layer(self, capacity: int) -> Tensor:
        """Fraction of each layer's active routes beyond `capacity` per expert, [L], whichever of them are dropped."""
        return (self.load - capacity).clamp_min(0).sum(dim=1) / self.load.sum(dim=1)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over counted decisions."""
        return torch.where(self.valid, values_N, 0).sum() / self.valid.sum()

    def mean_per_layer(self, values_N: Tensor) -> Tensor:
        """Mean over each layer's counted decisions, [L]."""
        total_L = self.decisions.sum_per_layer(torch.where(self.valid, values_N, 0))
        return total_L / self.decisions_per_layer.to(total_L)


@torch.no_grad()
def router_statistics(decisions: RouterInput, top_k: int) -> RouterStats:
    """One pass over the logits; everything the loss, its gradient and the record need."""
    logits_NE = decisions.logits_NE
    row_max = logits_NE.amax(dim=1)
    shifted_NE = logits_NE - row_max.unsqueeze(1)
    p_NE = shifted_NE.exp()
    s_N = p_NE.sum(dim=1)
    log_s = s_N.log()
    p_NE /= s_N.unsqueeze(1)
    # H = log S − Σ p (z − m); an expert at −inf has p = 0 and adds nothing, where a product would be NaN.
    entropy_N = log_s - torch.where(p_NE == 0, 0, p_NE * shifted_NE).sum(dim=1)
    tokens = TokenStats(
        row_max=row_max,
        log_s=log_s,
        target_logit=torch.zeros_like(row_max),
        valid=decisions.valid_N,
        vocab=decisions.experts,
    )
    return RouterStats(decisions, tokens, p_NE, entropy_N, _load(decisions, top_k))


def _load(decisions: RouterInput, top_k: int) -> Tensor:
    layers, experts = decisions.layers, decisions.experts
    if top_k == experts:
        routes_L = decisions.sum_per_layer(decisions.valid_N.to(decisions.logits_NE.dtype))
        return routes_L.unsqueeze(1).expand(layers, experts).clone()
    chosen_NK = decisions.logits_NE.topk(top_k, dim=1, sorted=False).indices + experts * decisions.layer_N.unsqueeze(1)
    counted_NK = decisions.valid_N.to(decisions.logits_NE.dtype).unsqueeze(1).expand_as(chosen_NK)
    load = decisions.logits_NE.new_zeros(layers * experts)
    load.scatter_add_(0, chosen_NK.reshape(-1), counted_NK.reshape(-1))
    return load.view(layers, experts)
