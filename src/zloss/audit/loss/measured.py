"""Measured gradients of several probe batches, with what a fit must know of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.loss.probes import Probe
from zloss.audit.loss.reference import Reference, concatenate
from zloss.audit.loss.warp import NO_WARP, Warp


@dataclass(frozen=True)
class Measured:
    """Gradients of several equally large batches, one after another."""

    reference: Reference
    grad_TV: Tensor
    noise_T: Tensor
    groups: dict[str, Tensor]
    """Name → bool per token."""
    batch_T: Tensor
    """Which batch a token was in."""
    eps: float
    """Unit roundoff of the arithmetic the loss showed."""
    given: Reference
    """The logits as the loss got them; `reference` holds them warped."""
    warp: Warp = NO_WARP
    ce_weight_T: Tensor | None = None
    """ω_t, the weight on the CE of each token relative to its mean; None is 1 everywhere."""
    z_weight_T: Tensor | None = None
    """ζ_t, the same for the penalty."""

    @property
    def omega_T(self) -> Tensor:
        return torch.ones_like(self.noise_T) if self.ce_weight_T is None else self.ce_weight_T

    @property
    def zeta_T(self) -> Tensor:
        return torch.ones_like(self.noise_T) if self.z_weight_T is None else self.z_weight_T

    def transport(self, source_TV: Tensor) -> Tensor:
        """A source at the warped logits, seen at the given ones."""
        return self.warp.transport(self.given, source_TV)


def measure(parts: Sequence[tuple[Probe, Tensor]], eps: float, warp: Warp = NO_WARP) -> Measured:
    """Join probes and their gradients; saturated rows of any batch form one group, others keep their probe's name."""
    reference = concatenate([probe.reference for probe, _ in parts])
    batch = torch.cat([torch.full_like(probe.target_T, i) for i, (probe, _) in enumerate(parts)])
    groups: dict[str, Tensor] = {}
    for i, (probe, _) in enumerate(parts):
        for label, rows in (("saturated", probe.saturated_T), (probe.name, ~probe.saturated_T)):
            name = probe.name if probe.name == "wide" else label
            if bool(rows.any()):
                empty = torch.zeros_like(batch, dtype=torch.bool)
                member = groups.get(name, empty).clone()
                member[batch == i] |= rows
                groups[name] = member
    grads = torch.cat([grad for _, grad in parts])
    noise_T = torch.cat([probe.noise_T for probe, _ in parts])
    return Measured(warp.reference(reference), grads, noise_T, groups, batch, eps, reference, warp)


def batch(data: Measured, index: int) -> Measured:
    """The tokens of one batch."""
    rows = data.batch_T == index
    r, given = data.reference, data.given
    weights = [None if x is None else x[rows] for x in (data.ce_weight_T, data.z_weight_T)]
    return Measured(
        Reference(r.logits_TV[rows], r.target_T[rows], r.lanes),
        data.grad_TV[rows],
        data.noise_T[rows],
        {name: member[rows] for name, member in data.groups.items()},
        data.batch_T[rows],
        data.eps,
        Reference(given.logits_TV[rows], given.target_T[rows], given.lanes),
        data.warp,
        *weights,
    )
