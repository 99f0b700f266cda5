"""What made a run: versions, command and time. They stand apart from metrics.json, which must not depend on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from zloss.head.native import row_pass_name
from zloss.results.provenance import RunProvenance, installed_version, shared_keys
from zloss.results.step_record import StepRecord


def run_provenance(command: str, began: float, records: Sequence[StepRecord]) -> RunProvenance:
    """The provenance of a run that (last) began at `began`, in seconds since the epoch, and has just ended."""
    return RunProvenance(
        **shared_keys(command, datetime.fromtimestamp(began, UTC), time.time() - began),
        accelerate=installed_version("accelerate"),
        train_seconds=sum(record.seconds or 0.0 for record in records),
        threads=torch.get_num_threads(),
        row_pass=row_pass_name(),
    )
