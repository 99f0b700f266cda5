"""An Adam state from a file: loaded in the order of its groups, rejected if it belongs to another model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tiny_run import tiny_config
from zloss.errors import CheckpointError
from zloss.results.run_config import TrainConfig
from zloss.train.folder import read_steps
from zloss.train.run import run_training
from zloss.train.start import Start, initial_checkpoint, make_adamw, prepare_start


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Start, Path]:
    folder = tmp_path_factory.mktemp("state")
    config = tiny_config(folder, steps=3, warmup=1)
    return config, prepare_start(config), folder


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps with made-up gradients, which differ between parameters."""
    for _ in range(2):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
        optimizer.step()


def moments(model: torch.nn.Module, optimizer: Any) -> list[float]:
    return [float(optimizer.state[parameter]["exp_avg"].flatten()[0]) for parameter in model.parameters()]


@pytest.mark.parametrize("groups", ["two", "one", "inside"])
def test_moments_come_back_to_their_parameters(started: tuple[TrainConfig, Start, Path], groups: str) -> None:
    config, start, folder = started
    model = initial_checkpoint(start, config).model
    before = torch.optim.AdamW(model.parameters()) if groups == "one" else make_adamw(model, config)
    stepped(model, before)
    state: Any = before.state_dict()
    file = folder / f"{groups}.pt"
    torch.save({"optimizer": state} if groups == "inside" else state, file)
    fresh = initial_checkpoint(start, config).model
    after = make_adamw(fresh, replace(config, optimizer_state=str(file), lr=7e-5))
    assert moments(fresh, after) == moments(model, before)
    assert {float(entry["step"]) for entry in after.state.values()} == {2.0}
    assert {group["lr"] for group in after.param_groups} == {7e-5}


def test_a_state_of_another_model_is_refused(started: tuple[TrainConfig, Start, Path]) -> None:
    config, start, folder = started
    model = initial_checkpoint(start, config).model

    def refused(state: dict[str, Any], message: str) -> None:
        torch.save(state, folder / "state")
        with pytest.raises(CheckpointError, match=message):
            make_adamw(model, replace(config, optimizer_state=str(folder / "state")))

    other = torch.optim.AdamW(torch.nn.Linear(3, 5).parameters())
    refused(other.state_dict(), "has 2 parameters, parameter 0 with Adam moments of shape None")
    refused(torch.optim.SGD(model.parameters()).state_dict(), "moments of shape None, but the model trains")
    optimizer = make_adamw(model, config)
    stepped(model, optimizer)
    state = optimizer.state_dict()
    del state["state"][0]["step"]  # some fused optimizers keep it in the group
    refused(state, "parameter 0 with Adam moments of shape None")
    state["state"][0] |= {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 2)}
    refused(state, r"parameter 0 with Adam moments of shape \[2, 2\], but")


def test_a_run_goes_on_from_the_state_and_its_config_names_it(started: tuple[TrainConfig, Start, Path]) -> None:
    config, start, folder = started
    model = initial_checkpoint(start, config).model
    optimizer = make_adamw(model, config)
    stepped(model, optimizer)
    torch.save(optimizer.state_dict(), folder / "adam.pt")
    given = replace(config, optimizer_state=str(folder / "adam.pt"))
    run_training(config, start, folder / "fresh")
    run_training(given, start, folder / "given")
    fresh, carried = (read_steps(folder / name) for name in ("fresh", "given"))
    assert fresh[0].loss == carried[0].loss
    assert fresh[2].loss != carried[2].loss
    assert "optimizer_state" not in json.loads((folder / "fresh" / "config.json").read_text())
    named = json.loads((folder / "given" / "config.json").read_text())["optimizer_state"]
    assert named.startswith("adam.pt sha256:")
    assert str(folder) not in named
