"""How far the applied source is from fp64 on logits as a model has them (paper eq:backward_deltas, Δ_src).

The Z source is what the gradient holds beyond cross-entropy: the difference to the loss with Z off where that is given,
else to the fp64 cross-entropy gradient. In the second case the rounding of the CE part counts too; `rounding_floor` says
how much of Δ_src that alone can be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.identification import Identification
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.precision import UNIT
from zloss.audit.loss.probes import Probe
from zloss.audit.loss.reference import Reference
from zloss.errors import InputError, ShapeError
from zloss.results.loss_audit import SourceError

Z_LIMIT = 1e-3
"""Δ_src of the Z source: fp32 stays below 1e-4, fp16 logits give 0.002 to 0.03, bf16 logits 0.05 to 0.2."""
TOTAL_LIMIT, TOTAL_LIMIT_16_BITS = 3e-4, 2e-2
MOST_TOKENS = 256
"""Audited tokens at most: fp64 copies of [T, V] logits are large."""


def audited_probe(
    ident: Identification, logits: Tensor | None, target: Tensor | None, ignore_index: int, seed: int
) -> tuple[Probe, torch.dtype]:
    """The given logits, or continuous ones of our own in fp32; and the dtype the loss is to see."""
    space = ident.space
    if logits is None:
        if target is not None:
            raise InputError("`target` was given without `logits`: pass both, or neither.")
        generator = torch.Generator().manual_seed(seed + 1)
        return probes.continuous(generator, **space.sizes()), torch.float32
    if logits.dim() < 2 or not logits.is_floating_point():
        raise ShapeError(
            f"`logits` is expected to be a floating tensor [..., V], but got {list(logits.shape)} {logits.dtype}."
        )
    flat = logits.detach().reshape(-1, logits.shape[-1])
    if target is None:
        labels = probes.allowed(flat.argmax(-1).cpu(), flat.shape[-1], space.avoid)
    elif target.numel() != flat.shape[0]:
        raise ShapeError(f"`target` has {target.numel()} entries for {flat.shape[0]} rows of `logits`.")
    else:
        labels = target.detach().reshape(-1).cpu()
        labels = torch.where(labels == ignore_index, torch.full_like(labels, -1), labels)
    flat, labels = flat[:MOST_TOKENS], labels[:MOST_TOKENS]
    lanes = flat.shape[-1] if not space.padded else min(space.lanes, flat.shape[-1])
    if bool((labels >= lanes).any()) or bool((labels < -1).any()):
        raise InputError(f"`target` holds class indices outside [0, {lanes}) that are not ignore_index={ignore_index}.")
    reference = Reference(flat.cpu().double(), labels, lanes)
    return Probe("audited", reference, torch.zeros(len(labels), dtype=torch.bool)), flat.dtype


def measure_source(
    box: BlackBox, off: BlackBox | None, ident: Identification, probe: Probe, dtype: torch.dtype
) -> tuple[SourceError, float]:
    """Δ_src, cosine and relative forward error, and the rounding floor of Δ_src. Norms are over all audited tokens."""
    name = str(dtype).removeprefix("torch.")
    tokens = len(probe.target_T)
    if not ident.trusted:
        why = "the gradient is not explained by a known penalty with equal token weights: no reference to compare with"
        if ident.selection.how == "rounded":
            why = "part of the gradient is noise of 16 bits, so the loss has no exact source to compare with"
        return SourceError(None, None, None, tokens=tokens, dtype=name, reason=why), 0.0
    try:
        outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
        without = None if off is None else off(probe.logits_TV, probe.target_T, dtype=dtype)
    except LossCallError as error:
        return SourceError(None, None, None, tokens=tokens, dtype=name, reason=str(error)), 0.0
    if ident.special and bool(torch.isin(probe.target_T, torch.tensor([one.index for one in ident.special])).any()):
        why = f"the targets include a class that is weighted differently ({ident.special[0].words})"
        return SourceError(None, None, None, tokens=tokens, dtype=name, reason=why), 0.0
    r, model = probe.reference, ident.model
    ce_TV, z_TV = model.ce_source(r), model.z_source(r)
    total_TV = ce_TV + z_TV
    if not outcome.finite:
        return SourceError(None, None, None, tokens=tokens, dtype=name, reason="loss or gradient is not finite"), 0.0
    tiny = torch.finfo(torch.float64).tiny
    value = model.value(r)
    forward = abs(outcome.value - value) / max(abs(value), tiny)
    delta_total = _ratio(outcome.grad_TV - total_TV, total_TV)
    if not model.penalties or not bool(z_TV.any()):
        cosine = _cosine(outcome.grad_TV, total_TV)
        return SourceError(forward, delta_total, cosine, "total", delta_total, tokens, name), 0.0
    ways = [outcome.grad_TV - ce_TV]
    if without is not None and without.finite:
        ways.append(outcome.grad_TV - without.grad_TV)
    # The Z source is total − CE, with the CE of `off` or of fp64. An `off` that still applies a Z would give 0, so the
    # difference that is nearer to the fp64 Z source is taken.
    applied_TV = min(ways, key=lambda way: _ratio(way - z_TV, z_TV))
    delta = _ratio(applied_TV - z_TV, z_TV)
    unit = max(UNIT.get(name, UNIT["float32"]), UNIT["float32"])
    rounding_T = unit * (probe.noise_T if unit == UNIT["float32"] else torch.ones_like(probe.noise_T))
    floor = 2 * float((rounding_T * total_TV.norm(dim=-1)).norm()) / max(float(z_TV.norm()), tiny)
    return SourceError(forward, delta, _cosine(applied_TV, z_TV), "z", delta_total, tokens, name), floor


def beyond_rounding(source: SourceError, floor: float) -> bool:
    """Whether the source is further from fp64 than fp32 rounding of the total gradient can bring it."""
    if source.delta_src is None or source.delta_total is None:
        return False
    total = TOTAL_LIMIT_16_BITS if source.dtype in ("bfloat16", "float16") else TOTAL_LIMIT
    return (source.of == "z" and source.delta_src > max(Z_LIMIT, 4 * floor)) or source.delta_total > total


def _ratio(error: Tensor, reference: Tensor) -> float:
    return float(error.norm()) / max(float(reference.norm()), torch.finfo(torch.float64).tiny)


def _cosine(a: Tensor, b: Tensor) -> float | None:
    norms = float(a.norm()) * float(b.norm())
    return float((a * b).sum()) / norms if norms > 0 else None
