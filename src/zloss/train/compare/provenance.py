"""How compared runs were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.results.provenance import together
from zloss.results.record import to_plain
from zloss.train.compare.finished_run import FinishedRun


def made_by(runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """`provenance` of comparison.json; None where a run does not say how it was made."""
    known = [run.provenance for run in runs if run.provenance is not None]
    if len(known) < len(runs):
        return None
    found: dict[str, Any] = to_plain(together(known))
    return found
