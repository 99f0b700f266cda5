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

    def ce_source(self, r: Reference) -> Tensor:
        """The cross-entropy part of the logit gradient, [T, V]."""
        given, r = r, self.warp.reference(r)
        smooth = self.smoothing * (r.onehot_TV - r.uniform_TV)
        rows = (r.p_TV - r.onehot_TV + smooth) * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, self.ce_scale * rows / self._count(self.ce_denominator, r))

    def z_source(self, r: Reference) -> Tensor:
        """The penalty part of the logit gradient, [T, V], on valid tokens."""
        given, r = r, self.warp.reference(r)
        total = torch.zeros_like(r.logits_TV)
        for one in self.penalties:
            amplitude = 2 * one.weight(r) * (one.candidate.value(r) - self._target(one, r))
            total = total + amplitude.unsqueeze(-1) * one.candidate.shape(r)
        rows = total * r.valid_T.unsqueeze(-1)
        return self.warp.transport(given, rows / self._count(self.z_denominator or "sum", r))

    def z_value(self, r: Reference) -> float:
        """The penalty part of the scalar."""
        return self._z_value(self.warp.reference(r))

    def _z_value(self, r: Reference) -> float:
        total = torch.zeros_like(r.log_z_T)
        for one in self.penalties:
            total = total + one.weight(r) * (one.candidate.value(r) - self._target(one, r)) ** 2
        return float((total * r.valid_T).sum()) / self._count(self.z_denominator or "sum", r)

    def value(self, r: Reference) -> float:
        """The whole scalar."""
        r = self.warp.reference(r)
        smooth = (1 - self.smoothing) * r.cross_entropy_T + self.smoothing * (r.log_z_T - r.mu_T) * r.valid_T
        ce = float(smooth.sum())
        return self.ce_scale * ce / self._count(self.ce_denominator, r) + self._z_value(r)

    def _target(self, one: Penalty, r: Reference) -> float:
        return one.target + (math.log(r.lanes / self.probe_vocab) if self.log_v_target else 0.0)

    @staticmethod
    def _count(name: str, r: Reference) -> float:
        return max(token_count(name, int(r.valid_T.sum()), len(r.valid_T)), 1.0)
