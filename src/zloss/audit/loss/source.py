"""The applied source against fp64 (paper eq:backward_deltas, Δ_src) on audited logits.

The Z source is what the gradient holds beyond cross-entropy: the difference from the loss with Z off where that is given, else
to the fp64 cross-entropy gradient. In the second case the rounding of the CE part counts too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.audit.loss.calls import LossCallError, dtype_name
from zloss.audit.loss.evidence import Evidence
from zloss.audit.loss.probes import Probe, allowed, draw
from zloss.errors import InputError, ShapeError
from zloss.results.loss_audit import SourceError

MOST_TOKENS = 256
"""Maximum number of audited tokens: fp64 copies of [T, V] logits are large."""


def audited_probe(e: Evidence, logits: Tensor | None, target: Tensor | None) -> tuple[Probe, torch.dtype]:
    """The given logits, or synthetic continuous ones in fp32; and the dtype that the loss receives."""
    space = e.space
    if logits is None:
        if target is not None:
            raise InputError("`target` was given without `logits`: pass both, or neither.")
        return draw("continuous", space, e.seed + 1), torch.float32
    flat = logits.detach().reshape(-1, logits.shape[-1])
    if target is None:
        labels = allowed(flat.argmax(-1).cpu(), space)
    elif target.numel() != flat.shape[0]:
        raise ShapeError(f"`target` has {target.numel()} entries for {flat.shape[0]} rows of `logits`.")
    else:
        labels = target.detach().reshape(-1).cpu()
        labels = torch.where(labels == e.loss.ignore_index, torch.full_like(labels, -1), labels)
    flat, labels = flat[:MOST_TOKENS], labels[:MOST_TOKENS]
    lanes = min(space.lanes, flat.shape[-1]) if space.padded else flat.shape[-1]
    if bool((labels >= lanes).any()) or bool((labels < -1).any()):
        raise InputError(
            f"`target` holds class indices outside [0, {lanes}) that are not ignore_index={e.loss.ignore_index}."
        )
    return Probe(flat.cpu().double(), labels, lanes, name="audited", warp=space.warp), flat.dtype


def measure_source(e: Evidence, logits: Tensor | None, target: Tensor | None) -> SourceError:
    """Δ_src, cosine and relative forward error; norms are over all audited tokens."""
    probe, dtype = audited_probe(e, logits, target)

    def unknown(reason: str) -> SourceError:
        return SourceError(None, None, None, tokens=len(probe.target_T), dtype=dtype_name(dtype), reason=reason)

    if e.changing or not e.plain or e.fitted is None:
        return unknown("the gradient is not explained by a known penalty with equal token weights")
    try:
        outcome = e.loss(probe, dtype)
    except LossCallError as error:
        return unknown(str(error))
    switched_off = None if e.off is None else e.off.attempt(probe, dtype)
    without = None if switched_off is None else switched_off.grad_TV
    if not outcome.finite:
        return unknown("loss or gradient is not finite")
    if e.at(probe.lanes) is None:
        return unknown(f"c at V = {probe.lanes} is not known")
    total_TV, z_TV = e.wanted(probe)
    has_z = bool(z_TV.any())
    error_TV = outcome.grad_TV - total_TV
    source_TV, off_TV = (z_TV, error_TV) if has_z else (total_TV, error_TV)
    if has_z and without is not None:
        # An `off` that still applies a Z would give 0: the nearer of the two differences is taken.
        off_TV = min(error_TV, outcome.grad_TV - without - z_TV, key=lambda one: float(one.norm()))
    applied_TV = source_TV + off_TV
    stated = e.value(probe)
    product = float((applied_TV * source_TV).sum())
    return SourceError(
        forward_rel_error=None if stated is None else abs(outcome.value - stated) / max(abs(stated), 1e-300),
        delta_src=float(off_TV.norm() / source_TV.norm()),
        cosine=product / float(applied_TV.norm() * source_TV.norm()),
        of="z" if has_z else "total",
        delta_total=float(error_TV.norm() / total_TV.norm()),
        tokens=len(probe.target_T),
        dtype=dtype_name(dtype),
    )
