"""The folder of one run: whose it is, and whether the run in it is finished."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from zloss.errors import InputError
from zloss.results.run_config import CONFIG_FILE, write_run_config
from zloss.results.run_metrics import METRICS_FILE
from zloss.results.train_config import TrainConfig
from zloss.train.config_record import config_record
from zloss.train.start import Start


def claim_folder(folder: Path, config: TrainConfig, start: Start) -> str:
    """Write config.json, or check that the one in `folder` is of the same run. The result identifies the run."""
    record = config_record(config, start)
    mine, file = record.to_dict(), folder / CONFIG_FILE
    if file.is_file():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            before = None
        if before is not None and before != mine:
            names = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
            raise InputError(
                f"{folder} holds a run with other settings ({', '.join(sorted(names))} differ): "
                "choose another folder, or remove that one."
            )
    write_run_config(folder, record)
    return hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:16]


def is_finished(folder: Path) -> bool:
    """Whether the folder holds the metrics of a finished run."""
    return (folder / METRICS_FILE).is_file()
