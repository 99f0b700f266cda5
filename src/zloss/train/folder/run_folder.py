"""The folder of one run: whose it is, which process works in it, and whether the run in it is finished."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zloss.distributed import Job
from zloss.errors import InputError
from zloss.models.checkpoint import sampled_fingerprint
from zloss.results.folder_lock import locked_folder
from zloss.results.reading import read_object
from zloss.results.run_config import CONFIG_FILE, RunConfig, write_run_config
from zloss.results.run_metrics import METRICS_FILE, RUN_AGAIN
from zloss.results.train_config import TrainConfig
from zloss.train.folder.config_record import config_record
from zloss.train.folder.saved_state import CHECKPOINTS
from zloss.train.folder.step_log import STEPS_FILE
from zloss.train.start.run_start import Start


@contextmanager
def run_in_folder(folder: Path, config: TrainConfig, start: Start, job: Job) -> Iterator[str]:
    """Hold the folder for one run; the value identifies the run. A process that comes second changes nothing in it.

    Of several ranks the first one holds the folder; ranks whose model, text or settings differ are refused.
    """
    with ExitStack() as held:

        def claim() -> str:
            if not job.first:
                return identity_of(config_record(config, start))
            held.enter_context(locked_folder(folder))
            return claim_folder(folder, config, start)

        identity = job.together(claim)
        job.together(check_alike, job.all_gather(identity), "models, texts or settings: give every process the same")
        yield identity


def check_alike(of_every_rank: Sequence[object], what: str) -> None:
    """Refuse ranks that differ; `what` completes the sentence."""
    if len(set(of_every_rank)) > 1:
        raise InputError(f"the ranks of the job have different {what}.")


def claim_folder(folder: Path, config: TrainConfig, start: Start) -> str:
    """Write config.json, or check that the one in `folder` is of the same run. The result identifies the run."""
    refuse_other_settings(folder, config, start)
    record = config_record(config, start)
    write_run_config(folder, record)
    return identity_of(record)


def settle_finished(folder: Path, config: TrainConfig, start: Start) -> None:
    """Check that a finished run is ours, and remove what a process that was killed at its very end left in the folder."""
    with locked_folder(folder):
        claim_folder(folder, config, start)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def refuse_other_settings(folder: Path, config: TrainConfig, start: Start) -> None:
    """An error where `folder` holds a run that differs from this one in a setting, its data or its initial weights."""
    before = earlier_settings(folder)
    refuse_differing(
        folder, [] if before is None else _differing(before, config_record(config, start).to_dict(), start)
    )


def refuse_differing(folder: Path, names: Sequence[str]) -> None:
    """An error where there are `names`: keys in which config.json of `folder` differs from that of a run."""
    if names:
        raise InputError(
            f"{folder} holds a run with other settings ({', '.join(sorted(names))} differ): "
            "choose another folder, or remove that one."
        )


def identity_of(record: RunConfig) -> str:
    """A number of the run, the same for the same settings, data and initial weights."""
    return hashlib.sha256(json.dumps(record.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def earlier_settings(folder: Path) -> dict[str, Any] | None:
    """config.json of the run that `folder` holds; None where there is none, or only the beginning of one.

    A config.json that is missing or damaged beside the metrics of a finished run is an error: nobody can say of which
    settings they are, so they are neither taken for ours nor overwritten.
    """
    try:
        return read_object(folder / CONFIG_FILE, advice=RUN_AGAIN)
    except InputError as error:
        if (folder / METRICS_FILE).exists():
            raise InputError(f"{folder} holds a finished run whose settings are unknown: {error}") from error
        return None


def _differing(before: dict[str, Any], mine: dict[str, Any], start: Start) -> list[str]:
    """Keys in which two config.json differ; a run of an earlier version has another fingerprint of the same weights."""
    names = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
    if names == ["initial_weights"] and before.get("initial_weights") == sampled_fingerprint(start.checkpoint.model):
        return []
    return names


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the metrics of a finished run and, by its config.json, the line of every step."""
    if not (folder / METRICS_FILE).is_file():
        return False
    try:
        steps = read_object(folder / CONFIG_FILE, advice=RUN_AGAIN).get("steps")
        return bool((folder / STEPS_FILE).read_bytes().count(b"\n") == steps)
    except (OSError, InputError):
        return False


def mark_unfinished(folder: Path) -> None:
    """Remove the metrics of an earlier run of the same settings, because its log is about to be written anew."""
    (folder / METRICS_FILE).unlink(missing_ok=True)
