"""Is the reported Z the one that is trained?"""

from __future__ import annotations

import math

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "reported_z_value"


def check(evidence: Evidence) -> Finding:
    """The reported number against λ Σ (v − c)²/D of the penalty that the gradient holds."""
    ident = evidence.ident
    plain = ident.outcomes["mixed"].reported
    if plain is None:
        return not_applicable(ID, "The loss reports no Z apart.")
    if plain.value is None:
        return not_applicable(ID, f"The reported Z has shape {list(plain.shape)}, not a scalar.")
    if not ident.trusted:
        return not_applicable(ID, "The penalty is not a known one, so its value cannot be predicted.")
    worst, ratio = 0.0, 1.0
    coarse = plain.dtype in (torch.bfloat16, torch.float16)
    for name, outcome in ident.outcomes.items():
        if outcome.reported is None or outcome.reported.value is None:
            continue
        if ident.selection.how == "moderate_only" and name == "wide":
            continue
        trained, said = ident.model.z_value(ident.probes[name].reference), outcome.reported.value
        if not math.isfinite(said):
            return found(ID, "The reported Z is not finite on ordinary logits.")
        scale = max(abs(trained), abs(said))
        # c is known to its uncertainty only, which matters where the violation is small.
        slack = 1e-9 + abs(outcome.value) * ident.eps * 4
        error = max(abs(said - trained) - slack, 0.0) / scale if scale else 0.0
        if error > worst:
            worst, ratio = error, said / trained if trained else math.inf
    if worst > (2e-2 if coarse else 2e-3):
        trained_words = f"{ratio:.4g} times" if math.isfinite(ratio) else "not 0, which is"
        return found(ID, f"The reported Z is {trained_words} the Z that is trained.", ratio)
    return passed(ID, "The reported Z is the one that is trained.", ratio)
