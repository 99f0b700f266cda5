"""Does the same call give the same answer, whatever the random state and whatever was called before?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, passed
from zloss.audit.loss.identify import difference
from zloss.audit.loss.probes import Probe
from zloss.results.loss_audit import Finding

ID = "not_repeatable"
REPEATS = 32
"""Calls of one batch, each under another random seed: whatever happens on every n-th call shows up to n = 32."""


def check(evidence: Evidence) -> Finding:
    """The first probe again at the end of the audit, and once more under another random seed."""
    ident = evidence.ident
    if ident.kept_state is not None:
        return found(ID, ident.kept_state)
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
    rare = _rare(evidence, ident.probes[probe_name], ident.outcomes[probe_name].value, tolerance)
    if rare is not None:
        return rare
    return passed(
        ID, f"The same inputs give the same value in {REPEATS} calls, and the same gradient.", max(drift, noise)
    )


def _rare(evidence: Evidence, probe: Probe, value: float, tolerance: float) -> Finding | None:
    """A finding where one of many calls has another value; the same seed again tells chance from state."""

    def change(seed: int) -> float:
        now = evidence.box.values(probe.logits_TV, probe.target_T, dtype=evidence.ident.dtype, seed=seed)
        return abs(now - value) / max(abs(value), 1e-12)

    for call in range(REPEATS):
        seed = evidence.seed + 1000 + call
        changed = change(seed)
        if changed <= tolerance:
            continue
        again = change(seed)
        if abs(again - changed) <= tolerance * max(1.0, changed):
            return found(
                ID, f"The loss draws random numbers: one seed in {call + 1} changes it by {changed:.3g}.", changed
            )
        return found(
            ID,
            f"One of {call + 1} calls with the same inputs gives another value (relative change {changed:.3g}): the loss keeps "
            "state, or uses a generator that the audit cannot seed.",
            changed,
        )
    return None
