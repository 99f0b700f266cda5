"""The scalars of `attach` are read back from trackers; all of them get them through the trainer's own `log`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.transformers.small_models import OBJECTIVE, small
from tests.integrations.transformers.trainers import make_trainer, train
from zloss.integrations.transformers import attach


@pytest.mark.slow
def test_scalars_come_back_from_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    monkeypatch.chdir(tmp_path)
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = ["tensorboard", "mlflow"]
    trainer = make_trainer(small(), max_steps=2, report_to=trackers, output_dir=str(tmp_path / "out"), run_name="r")
    attach(trainer, OBJECTIVE)
    wanted = [log["zloss/z"] for log in train(trainer)]
    mlflow.end_run()
    (events,) = (tmp_path / "tb").rglob("events*")
    board = EventAccumulator(str(events))
    board.Reload()
    assert [event.value for event in board.Scalars("train/zloss/z")] == pytest.approx(wanted, rel=1e-6)
    (metric,) = [path for path in (tmp_path / "mlruns").rglob("z") if path.parent.name == "zloss"]
    assert [float(line.split()[1]) for line in metric.read_text().splitlines()] == pytest.approx(wanted)
