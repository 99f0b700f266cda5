"""Does the loss train row t on the target of another row? Models of Hugging Face shift their labels inside."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from zloss.audit.loss.decompose import Rows, decompose
from zloss.audit.loss.measured import Measured
from zloss.audit.loss.reference import Reference

Moved = Literal["shifted", "rolled"]


def find_moved(data: Measured) -> Moved | None:
    """`data` is one batch. "shifted": row t has target t + 1 and the last row none; "rolled": the last has target 0."""
    rows = _with_targets_of(data, 1)
    last = len(rows.a_T) - 1
    inner = rows.solved_T.clone()
    inner[last] = False
    if not bool(inner.any()) or not bool(rows.inside_T[inner].all()):
        return None
    if not bool((rows.b_T[inner] > 10 * rows.tolerance_T[inner]).all()):
        return None
    # Ties of all classes aside, a row that is inside the three directions of its own target says nothing.
    own = decompose(data)
    if bool(own.inside_T[inner].all()) and float(own.b_T[inner].abs().max()) > float(rows.b_T[inner].abs().max()) / 2:
        return None
    trained = bool(rows.inside_T[last]) and float(rows.b_T[last]) > 0.1 * float(rows.b_T[inner].median())
    return "rolled" if trained else "shifted"


def _with_targets_of(data: Measured, ahead: int) -> Rows:
    r, given = data.reference, data.given
    target = r.target_T.roll(-ahead)
    return decompose(
        replace(
            data,
            reference=Reference(r.logits_TV, target, r.lanes),
            given=Reference(given.logits_TV, target, given.lanes),
        )
    )
