"""Does the same call give the same answer, whatever the random state and whatever was called before?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.audit.loss.identify import difference
from zloss.results.loss_audit import Finding

ID = "not_repeatable"


def check(evidence: Evidence) -> Finding:
    """The first probe again at the end of the audit, and once more under another random seed."""
    ident = evidence.ident
    first, probe = ident.outcomes["mixed"], ident.probes["mixed"]
    tolerance = max(1e-5, 8 * ident.eps)
    probe_name = "wide" if "wide" in ident.outcomes else "mixed"
    loudest = evidence.attempt(ident.probes[probe_name])
    again = evidence.attempt(probe)
    if isinstance(again, str):
        return found(ID, f"A call that worked at first fails after {evidence.box.calls} calls: {again}")
    drift = difference(first, again)
    if not isinstance(loudest, str):
        # There the Z is louder than the cross-entropy.
        drift = max(drift, difference(ident.outcomes[probe_name], loudest))
    if not drift <= tolerance:
        return found(
            ID,
            f"The same inputs give another answer after {evidence.box.calls} calls (relative change {drift:.3g}): "
            "the loss keeps state, and what was identified holds for one moment of it.",
            drift,
        )
    reseeded = evidence.attempt(probe, seed=evidence.seed + 12345)
    if isinstance(reseeded, str):
        return found(ID, f"The same call fails under another random seed: {reseeded}")
    noise = difference(first, reseeded)
    if not noise <= tolerance:
        return found(
            ID, f"The loss draws random numbers: another seed changes it by {noise:.3g} (dropout inside?).", noise
        )
    return passed(ID, "The same inputs give the same value and gradient.", max(drift, noise))
