"""What a loss returned: the scalar to train on and, where it gives one, the Z it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.errors import InputError

_Z_NAMES = ("z_loss", "auxiliary")


class LossCallError(InputError):
    """The audited loss raised, or returned something that is not a loss."""


@dataclass(frozen=True)
class LossOutput:
    """`loss` as returned, and the Z reported beside it (a tensor, a number, or None)."""

    loss: Tensor
    reported: Tensor | float | None


def read_output(returned: Any, name: str) -> LossOutput:
    """Accept a tensor, a tuple (loss, z, ...), a mapping with "loss", or an object with `.loss`."""
    if isinstance(returned, Tensor):
        return LossOutput(returned, None)
    if isinstance(returned, Mapping) and "loss" in returned:
        return LossOutput(_tensor(returned["loss"], name), _first_z([returned.get(key) for key in _Z_NAMES]))
    if hasattr(returned, "loss"):
        return LossOutput(_tensor(returned.loss, name), _first_z([getattr(returned, key, None) for key in _Z_NAMES]))
    if isinstance(returned, (tuple, list)) and returned:
        return LossOutput(_tensor(returned[0], name), _first_z(list(returned[1:2])))
    raise LossCallError(
        f"{name} returned {_describe(returned)}, but a loss is expected: a scalar tensor, a tuple whose first item is "
        "the loss, or an object with `.loss`."
    )


def _tensor(loss: Any, name: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise LossCallError(
            f"{name} gives {_describe(loss)} as its loss, but a tensor with a gradient is expected: "
            "return the loss before `.item()` or `float()`."
        )
    return loss


def _first_z(items: list[Any]) -> Tensor | float | None:
    for item in items:
        if isinstance(item, Tensor) and (item.is_floating_point() or item.dtype == torch.int64):
            return item
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            return float(item)
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
