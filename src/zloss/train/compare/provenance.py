"""How compared runs were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.train.compare.finished_run import FinishedRun


def made_by(runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """`provenance` of comparison.json; None where a run does not say how it was made."""
    known = [run.provenance for run in runs if run.provenance is not None]
    if len(known) < len(runs):
        return None
    return {
        "runs": len(known),
        "commands": list(dict.fromkeys(made.command for made in known)),
        "seconds": sum(made.seconds for made in known),
        "threads": max(made.threads for made in known),
        "zloss": ", ".join(dict.fromkeys(made.zloss for made in known)),
        "torch": ", ".join(dict.fromkeys(made.torch for made in known)),
    }
