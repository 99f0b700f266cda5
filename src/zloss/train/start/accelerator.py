"""The accelerator of a run: device, autocast and trackers, through accelerate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zloss.errors import InputError, MissingDependencyError
from zloss.results.train_config import TrainConfig
from zloss.train.step.tracker_errors import tracker_errors


def make_accelerator(config: TrainConfig, folder: Path, trackers: Sequence[str]) -> Any:
    """An `accelerate.Accelerator` of one process at the run's precision, with its trackers started."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    # Tied weights are stored once, on purpose; accelerate warns of it at every checkpoint.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # Precision is a state of the process in accelerate: the next run may have another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=str(folder),
    )
    if accelerator.num_processes > 1:
        raise InputError(f"zloss train runs in one process, but was started in {accelerator.num_processes}.")
    if trackers:
        plain = {key: value for key, value in asdict(config).items() if isinstance(value, (bool, int, float, str))}
        with tracker_errors():
            accelerator.init_trackers("tracking", config=plain)
    return accelerator


def close_accelerator(accelerator: Any) -> None:
    """End the trackers and let go of the prepared model."""
    with tracker_errors():
        accelerator.end_training()
    accelerator.free_memory()
