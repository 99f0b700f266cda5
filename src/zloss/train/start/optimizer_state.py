"""The state of Adam that lies beside a checkpoint of another trainer, for runs that go on from the middle of a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zloss.errors import CheckpointError, first_line

MOMENTS = ("exp_avg", "exp_avg_sq")


def read_adam_state(file: str) -> dict[str, Any]:
    """The `state_dict` in a file, read without unpickling code."""
    if not Path(file).is_file():
        raise CheckpointError(f"there is no file {file} for `optimizer_state`.")
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"`optimizer_state` {file} cannot be read: {first_line(error)}.") from error
    if isinstance(found, dict) and isinstance(found.get("optimizer"), dict):
        found = found["optimizer"]
    if not isinstance(found, dict) or not {"state", "param_groups"} <= found.keys():
        raise CheckpointError(
            f"`optimizer_state` {file} is expected to be the `state_dict` of an optimizer, with `state` and `param_groups`."
        )
    return found


def load_adam_state(optimizer: torch.optim.Optimizer, model: nn.Module, file: str) -> None:
    """Moments and step counts of every parameter; learning rate, decay and β stay those of `optimizer`.

    A `state_dict` numbers its parameters in the order of its groups. Two groups of the same sizes as ours (decayed and not
    decayed, as in transformers) have our order; one group has that of the model. Shapes are compared for every parameter.
    """
    saved = read_adam_state(file)
    ours = [list(group["params"]) for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in saved["param_groups"]]
    if [len(group) for group in theirs] == [len(group) for group in ours]:
        parameters = [parameter for group in ours for parameter in group]
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = [number for group in theirs for number in group]
    states = [saved["state"].get(number) for number in numbers]
    _check(file, parameters, states)
    for parameter, state in zip(parameters, states, strict=True):
        moments = {name: state[name].to(parameter.dtype).clone() for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.as_tensor(float(state["step"])), **moments}


def _check(file: str, parameters: Sequence[nn.Parameter], states: Sequence[Any]) -> None:
    if len(parameters) != len(states):
        raise CheckpointError(
            f"`optimizer_state` {file} is of {len(states)} parameters, but the model trains {len(parameters)}."
        )
    for index, (parameter, state) in enumerate(zip(parameters, states, strict=True)):
        if not isinstance(state, dict) or not {"step", *MOMENTS} <= state.keys():
            raise CheckpointError(f"`optimizer_state` {file} has no Adam moments of parameter {index}.")
        if any(state[name].shape != parameter.shape for name in MOMENTS):
            raise CheckpointError(
                f"`optimizer_state` {file} has moments of shape {list(state[MOMENTS[0]].shape)} for parameter {index}, "
                f"which is {list(parameter.shape)}: it is of another model or another order of parameters."
            )
