"""Do padding rows of the vocabulary enter log Z?"""

from __future__ import annotations

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.audit.loss.probes import Probe
from zloss.audit.loss.reference import Reference
from zloss.results.loss_audit import Finding

ID = "padding_in_log_z"


def check(evidence: Evidence) -> Finding:
    """Fill the padding lanes differently, and cut them off: value and gradient must not change.

    The whole batch is also moved down to −40, where lanes masked before a softcap come back above the real ones.
    """
    ident = evidence.ident
    lanes, width = ident.space.lanes, ident.space.width
    if lanes == width:
        return not_applicable(ID, "If the vocabulary is padded, pass the number of real rows as `valid_vocab=`.")
    generator = torch.Generator().manual_seed(evidence.seed)
    base = probes.continuous(generator, **ident.space.sizes())
    worst, where, tried = 0.0, "", 0
    for shift in (0.0, -40.0):
        moved = base.shifted(shift)
        plain = evidence.attempt(moved)
        if isinstance(plain, str):
            return not_applicable(ID, f"Padded logits could not be tried: {plain}")
        others = {f"lanes at {fill:+.0f}": _filled(moved, fill) for fill in (0.0, 50.0)}
        others["lanes cut off"] = _cut(moved)
        for words, probe in others.items():
            outcome = evidence.attempt(probe)
            if isinstance(outcome, str):
                continue
            tried += 1
            change = _change(plain.value, plain.grad_TV[:, :lanes], outcome.value, outcome.grad_TV[:, :lanes])
            if not change <= worst:
                worst, where = change, words
            beyond = float(outcome.grad_TV[:, lanes:].norm()) / max(float(outcome.grad_TV.norm()), 1e-300)
            if not beyond <= worst:
                worst, where = beyond, f"{words}, which receive a gradient"
    if not worst <= max(1e-4, 16 * ident.eps):
        return found(ID, f"Padding rows enter log Z: value or gradient moves by {worst:.3g} ({where}).", worst)
    if not tried:
        return not_applicable(ID, "The loss accepts no other values in its padding rows, so nothing could be compared.")
    return passed(ID, f"The {width - lanes} padding rows stay outside log Z.", worst)


def _filled(probe: Probe, fill: float) -> Probe:
    logits = probe.logits_TV.clone()
    logits[:, probe.reference.lanes :] = fill
    return probe.with_logits(logits)


def _cut(probe: Probe) -> Probe:
    lanes = probe.reference.lanes
    return Probe(probe.name, Reference(probe.logits_TV[:, :lanes], probe.target_T, lanes), probe.saturated_T)


def _change(value: float, grad: torch.Tensor, other_value: float, other_grad: torch.Tensor) -> float:
    in_value = abs(value - other_value) / max(abs(value), 1e-12)
    return max(in_value, float((grad - other_grad).norm()) / max(float(grad.norm()), 1e-300))
