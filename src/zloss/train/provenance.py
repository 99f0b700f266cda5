"""provenance.json of a run: versions, command and time, apart from the metrics, which must not depend on them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import zloss
from zloss.results.step_record import StepRecord
from zloss.train.compare.finished_run import FinishedRun


def run_provenance(command: str, began: float, records: Sequence[StepRecord]) -> dict[str, Any]:
    """What made the run; `train_seconds` adds up all steps, also those before an interruption."""
    return {
        "zloss": zloss.__version__,
        "torch": torch.__version__,
        **{name: metadata.version(name) for name in ("transformers", "accelerate")},
        "command": command,
        "started": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "seconds": time.time() - began,
        "train_seconds": sum(record.seconds or 0.0 for record in records),
        "threads": torch.get_num_threads(),
    }


def made_by(runs: Sequence[FinishedRun]) -> dict[str, Any] | None:
    """How compared runs were made, together; None where a run does not say."""
    try:
        records = [json.loads((run.folder / "provenance.json").read_text(encoding="utf-8")) for run in runs]
    except (OSError, ValueError):
        return None
    shared = {key: ", ".join(dict.fromkeys(str(record[key]) for record in records)) for key in ("zloss", "torch")}
    return {
        "runs": len(records),
        "commands": list(dict.fromkeys(record["command"] for record in records)),
        "seconds": sum(record["seconds"] for record in records),
        "threads": max(record["threads"] for record in records),
        **shared,
    }
