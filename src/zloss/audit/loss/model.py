"""The identified objective as a function: the fp64 gradient and value it should give on any logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.candidates import Candidate
from zloss.audit.loss.denominator import token_count
from zloss.audit.loss.reference import Reference
from zloss.audit.loss.warp import NO_WARP, Warp


@dataclass(frozen=True)
class Penalty:
    """λ(v − c)² for one candidate v, divided by 1 + βA_p² where a damping β is given."""

    candidate: Candidate
    coef: float
    target: float
    damping: float | None = None

    def weight(self, r: Reference) -> Tensor:
        """λ of every token."""
        flat = torch.full_like(r.log_z_T, self.coef)
        return flat if self.damping is None else flat / (1 + self.damping * r.gain_squared_T)


@dataclass(frozen=True)
class Model:
    """ce_scale · CE_ε / D_ce + Σ_k λ_k (v_k − c_k)² / D_z. Scaling: denominators as named, over valid tokens."""

    penalties: tuple[Penalty, ...]
    ce_denominator: str
    z_denominator: str | None
    ce_scale: float
    smoothing: float
    warp: Warp = NO_WARP
    """What happens to the logits before the softmax."""
    probe_vocab: int = 0
    """The V the targets were identified at."""
    log_v_target: bool = False
    """Whether c follows log V of the logits instead of staying constant."""
    smoothing_over_others: bool = False
    """Whether the smoothed mass is shared by the V − 1 other classes (t5x); `smoothing` is V/(V − 1) of its ε then."""

    def ce_source(self, r: Reference) -> Tensor:
        """The cross-entropy part of the logit gradient, [T, V]."""
        given, r = r, self.warp.reference(r)
        smooth = self._smoothing(r) * (r.onehot_TV - r.uniform_TV)
        rows = (r.p_TV - r.onehot_TV + smooth) * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, self.ce_scale * rows / self.count(self.ce_denominator, r))

    def z_source(self, r: Reference) -> Tensor:
        """The penalty part of the logit gradient, [T, V], on valid tokens."""
        given, r = r, self.warp.reference(r)
        total = torch.zeros_like(r.logits_TV)
        for one in self.penalties:
            amplitude = one.candidate.factor * one.weight(r) * (one.candidate.value(r) - self._target(one, r))
            total = total + amplitude.unsqueeze(-1) * one.candidate.shape(r)
        rows = total * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, rows / self.count(self.z_denominator or "sum", r))

    def z_value(self, r: Reference) -> float:
        """The penalty part of the scalar."""
        return self._z_value(self.warp.reference(r))

    def _z_value(self, r: Reference) -> float:
        total = torch.zeros_like(r.log_z_T)
        for one in self.penalties:
            total = total + one.weight(r) * (one.candidate.value(r) - self._target(one, r)) ** 2
        return float((total * r.valid_T).sum()) / self.count(self.z_denominator or "sum", r)

    def value(self, r: Reference) -> float:
        """The whole scalar."""
        r = self.warp.reference(r)
        epsilon = self._smoothing(r)
        smooth = (1 - epsilon) * r.cross_entropy_T + epsilon * (r.log_z_T - r.mu_T) * r.valid_T
        ce = float(smooth.sum())
        return self.ce_scale * ce / self.count(self.ce_denominator, r) + self._z_value(r)

    def smoothing_entropy(self, lanes: int) -> float:
        """−Σ q log q of the smoothed target at V = `lanes`: the constant that t5x takes off its loss."""
        epsilon = self._epsilon(lanes)
        low, high = epsilon / lanes, 1 - epsilon + epsilon / lanes
        if not 0 < epsilon < 1:
            return 0.0
        return -(high * math.log(high) + (lanes - 1) * low * math.log(low))

    def _smoothing(self, r: Reference) -> float:
        return self._epsilon(r.lanes)

    def _epsilon(self, lanes: int) -> float:
        """ε of (1 − ε) onehot(y) + ε/V at V = `lanes`."""
        if not self.smoothing_over_others:
            return self.smoothing
        there, here = lanes / (lanes - 1), self.probe_vocab / (self.probe_vocab - 1)
        return self.smoothing * there / here

    def _target(self, one: Penalty, r: Reference) -> float:
        return one.target + (math.log(r.lanes / self.probe_vocab) if self.log_v_target else 0.0)

    @staticmethod
    def count(name: str, r: Reference) -> float:
        """The number a part is divided by on these tokens."""
        return max(token_count(name, int(r.valid_T.sum()), len(r.valid_T)), 1.0)
