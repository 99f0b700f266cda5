"""The scalars and alerts of `attach` are read back from the trackers."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.transformers.small_models import OBJECTIVE, small
from tests.integrations.transformers.trainers import make_trainer, train
from zloss.integrations.transformers import attach


@pytest.mark.slow
def test_scalars_come_back_from_every_tracker_and_an_alert_from_those_that_have_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "tb"),
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    # trackio reads its folder when it is imported, which another test may have done.
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("wandb", "trackio", "mlflow", "tensorboard"):
        pytest.importorskip(name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = ["tensorboard", "wandb", "trackio", "mlflow"]
    trainer = make_trainer(small(), max_steps=2, report_to=trackers, output_dir=str(tmp_path / "out"), run_name="r")
    attached = attach(trainer, OBJECTIVE)
    both = attached.window.both
    monkeypatch.setattr(attached.window, "both", lambda: (both()[0], {"fp16_margin": math.nan}))
    wanted = [log["zloss/z"] for log in train(trainer)]
    import mlflow
    import wandb

    wandb.finish()
    mlflow.end_run()

    (events,) = (tmp_path / "tb").rglob("events*")
    board = EventAccumulator(str(events))
    board.Reload()
    assert [event.value for event in board.Scalars("train/zloss/z")] == pytest.approx(wanted, rel=1e-6)
    (metric,) = [path for path in (tmp_path / "mlruns").rglob("z") if path.parent.name == "zloss"]
    assert [float(line.split()[1]) for line in metric.read_text().splitlines()] == pytest.approx(wanted)
    (base,) = (tmp_path / "trackio").glob("*.db")
    rows: list[Any] = []
    alerts: list[Any] = []
    deadline = time.monotonic() + 60
    while not (len(rows) >= len(wanted) and alerts) and time.monotonic() < deadline:  # a thread of trackio writes them
        time.sleep(0.1)
        with sqlite3.connect(base) as database:
            rows = [json.loads(row[0]) for row in database.execute("select metrics from metrics")]
            alerts = list(database.execute("select title, text, level from alerts"))
    assert [row["train/zloss/z"] for row in rows if "train/zloss/z" in row] == pytest.approx(wanted)
    alert = ("zloss: nonfinite", "step 1: not finite: fp16_margin.")
    assert alerts == [(*alert, "warn")]
    (binary,) = tmp_path.rglob("*.wandb")
    histories = [
        {item.key or "/".join(item.nested_key): item.value_json for item in history.item}
        for history in wandb_records(binary, "history")
    ]
    values = [float(json.loads(items["train/zloss/z"])) for items in histories if "train/zloss/z" in items]
    assert values == pytest.approx(wanted)
    assert [(sent.title, sent.text, sent.level) for sent in wandb_records(binary, "alert")] == [(*alert, "WARN")]


def wandb_records(file: Path, kind: str) -> list[Any]:
    """The records of one kind in an offline run of W&B, in the order they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(content) for content in log_records(file.read_bytes())]
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def log_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format behind a header of 7 bytes.

    A record is one or more chunks, each with a header of checksum (4 bytes), length (2) and kind (1): whole 1, first 2,
    middle 3, last 4. No chunk crosses a block of 32 kB; what is too short for a header at its end is padding.
    """
    place, parts = 7, []
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        place += 7
        parts.append(data[place : place + length])
        place += length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []
