"""The accelerator of a run: device, autocast and trackers, through accelerate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zloss.distributed import Job
from zloss.errors import InputError, MissingDependencyError
from zloss.results.train_config import TrainConfig
from zloss.train.step.tracker_errors import tracker_errors


def make_accelerator(config: TrainConfig, folder: Path, trackers: Sequence[str], job: Job) -> Any:
    """An `accelerate.Accelerator` of the processes of a job at the run's precision, with its trackers started."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
    except ImportError as error:
        raise MissingDependencyError("accelerate", "Training", "train") from error
    # Tied weights are stored once, on purpose; accelerate warns of it at every checkpoint.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # Precision is a state of the process in accelerate: the next run may have another.
    AcceleratorState._reset_state()
    # So is what another trainer left in the middle of its accumulation: its optimizer would then leave every update out.
    GradientState._reset_state()
    accelerator = Accelerator(
        # Without this it takes the processes of a launcher on a machine without GPUs for single ones.
        cpu=job.ranks > 1 and not torch.cuda.is_available(),
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(trackers) or None,
        project_dir=str(folder),
    )
    if accelerator.num_processes != job.ranks:
        raise InputError(
            f"the run is expected to have {job.ranks} processes, but accelerate counts {accelerator.num_processes}: "
            "run it on one process, or call `run_training_of` with the job of `open_job`."
        )
    if trackers:
        plain = {key: value for key, value in asdict(config).items() if isinstance(value, (bool, int, float, str))}
        with tracker_errors():
            accelerator.init_trackers("tracking", config=plain)
    return accelerator


def close_accelerator(accelerator: Any) -> None:
    """End the trackers and let go of the prepared model."""
    with tracker_errors():
        for tracker in accelerator.trackers:
            tracker.finish()  # `end_training` would also take down the process group, which the next run needs
    accelerator.free_memory()
