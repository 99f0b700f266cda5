"""`attach(..., record=DIR)`: a Trainer's run in the folder that `zloss compare` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zloss
from tests.integrations.transformers.small_models import VOCAB, small
from tests.integrations.transformers.trainers import STEPS, make_trainer, train
from zloss.cli.main import main
from zloss.errors import InputError
from zloss.integrations.transformers import attach
from zloss.results.run_metrics import read_metrics
from zloss.train.folder import read_steps

VALID = torch.randint(3, VOCAB, (80, 17), generator=torch.Generator().manual_seed(7))
OPTIONS = zloss.RecordOptions(adam_every=2, gradient_blocks=2)


def recorded(folder: Path, objective: Any, seed: int = 0, model: Any = None, **settings: Any) -> tuple[Any, list[Any]]:
    trainer = make_trainer(small() if model is None else model, seed=seed, **settings)
    attach(trainer, objective, record=folder, validation=VALID, record_options=OPTIONS)
    return trainer, train(trainer)


def test_two_methods_and_two_seeds_get_a_verdict(tmp_path: Path) -> None:
    for seed in (0, 1):
        for objective in (zloss.CrossEntropy(), zloss.CenteredZLoss(1e-1)):
            recorded(tmp_path, objective, seed)
    assert main(["compare", str(tmp_path), "--quiet"]) == 0
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["seeds"] == [0, 1]
    assert comparison["quality"]["seed_varies"].endswith("not the initial weights")
    (verdict,) = comparison["quality"]["methods"]
    assert verdict["verdict"] in ("accepted", "rejected", "inconclusive")
    for part in ("coordinate", "quality"):
        interval = verdict["parts"][part]["interval"]
        assert interval["lower"] < interval["upper"], part


def test_steps_and_validation_are_those_of_the_trainer(tmp_path: Path) -> None:
    trainer, logs = recorded(tmp_path, zloss.StandardZLoss(1e-2))
    folder = tmp_path / "standard-0.01-s0"
    steps = read_steps(folder)
    assert [record.step for record in steps] == list(range(1, STEPS + 1))
    for record, log in zip(steps, logs, strict=True):
        assert record.loss == pytest.approx(log["loss"], rel=1e-4)
        assert record.grad_norm == pytest.approx(log["grad_norm"], rel=1e-5)
        assert record.postclip_norm == pytest.approx(0.1, rel=1e-4)
        assert record.lr == pytest.approx(1e-3)
        assert record.updated
    assert [record.micro_batches for record in steps] == [3, 3, 1, 3, 3]
    assert [record.adam is not None for record in steps] == [False, True, False, True, False]
    metrics = read_metrics(folder)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=VALID[:, :-1]).logits.double()
    ce = F.cross_entropy(logits.flatten(0, 1), VALID[:, 1:].flatten(), reduction="none").view(80, 16)
    assert metrics.validation_blocks is not None
    assert metrics.validation_blocks.ce == pytest.approx(ce.mean(dim=1).tolist(), rel=1e-5)
    assert (metrics.training.clip_rate, metrics.training.steps) == (1.0, STEPS)
    assert metrics.gradients.r_aux is not None
    config = json.loads((folder / "config.json").read_text())
    assert (config["loop"], config["clip"], config["settings"]["learning_rate"]) == ("Trainer", 0.1, 1e-3)
    assert not any("/" in str(value) for value in config["settings"].values())


def test_a_resumed_trainer_continues_in_its_folder(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "out")}
    folder = tmp_path / "standard-0.01-s0"
    recorded(tmp_path, zloss.StandardZLoss(1e-2), **settings)
    trainer = make_trainer(small(), seed=0, **settings)
    attach(trainer, zloss.StandardZLoss(1e-2), record=tmp_path, validation=VALID, record_options=OPTIONS)
    before = read_steps(folder)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    after = read_steps(folder)
    assert [record.step for record in after] == list(range(1, STEPS + 1))
    assert [record.loss for record in after] == pytest.approx([record.loss for record in before], rel=1e-5)
    assert read_metrics(folder).tokens_consumed == sum(record.telemetry["tokens"] or 0 for record in before)


def test_a_record_needs_validation_and_leaves_no_trace_where_it_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(small())
    with pytest.raises(InputError, match="belong together"):
        attach(trainer, zloss.CrossEntropy(), record=tmp_path)
    with pytest.raises(InputError, match="rows"):
        attach(trainer, zloss.CrossEntropy(), record=tmp_path, validation=[[1, 10**6]])
    assert not trainer.model._forward_pre_hooks
    attach(trainer, zloss.CrossEntropy(), record=tmp_path, validation=VALID).remove()
    assert not list(tmp_path.iterdir())
