"""What does the loss return beside itself?"""

from __future__ import annotations

from zloss.audit.loss.evidence import Evidence, found, not_applicable, passed
from zloss.results.loss_audit import Finding

ID = "returned_values"


def check(evidence: Evidence) -> Finding:
    """Each returned value by what it is; a Z that the caller has to add is worth a note."""
    if evidence.box.added is not None:
        return found(
            ID,
            f"The first returned value is cross-entropy alone, and the Z is returned beside it (`{evidence.box.added}`). "
            "It trains only if the caller adds it: what is identified here is the sum of the two.",
        )
    if not evidence.returned:
        return not_applicable(ID, "The loss returns one value.")
    told = "; ".join(f"`{one.name}` is {one.words}" for one in evidence.returned)
    return passed(ID, f"Beside the loss: {told}.")
