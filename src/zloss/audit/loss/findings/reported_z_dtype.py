"""Is the reported Z rounded to 16 bits?"""

from __future__ import annotations

import torch

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "reported_z_dtype"


def check(evidence: Evidence) -> Finding:
    """Call with bf16 logits, as a mixed-precision model would, and look at the dtype of what comes back."""
    probe = evidence.ident.probes["mixed"]
    plain = evidence.ident.outcomes["mixed"]
    half = evidence.attempt(probe, dtype=torch.bfloat16)
    z = evidence.reported
    outcomes = [plain] if isinstance(half, str) else [plain, half]
    returned = "" if isinstance(half, str) else f" bf16 logits give a {_name(half.dtype)} loss."
    if plain.dtype in (torch.bfloat16, torch.float16):
        wide = _name(evidence.ident.dtype)
        return found(
            ID, f"{wide} logits give a {_name(plain.dtype)} loss: the logged value has two or three digits.", 16.0
        )
    if z is None:
        return not_applicable(ID, f"The loss reports no Z apart.{returned}")
    for outcome in outcomes:
        reported = outcome.item(z.name)
        dtype = None if reported is None else reported.dtype
        if dtype in (torch.bfloat16, torch.float16):
            return found(ID, f"The reported Z comes in {_name(dtype)}, with two or three digits.{returned}", 16.0)
    return passed(ID, f"The reported Z has at least fp32.{returned}")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
