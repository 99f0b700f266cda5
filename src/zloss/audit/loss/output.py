"""What a loss returned: the scalar to train on, and the named scalars and tensors beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zloss.errors import InputError

LOSS_NAMES = ("loss", "total_loss", "total")
Z_NAMES = ("z_loss", "auxiliary", "zloss", "z", "aux_loss")


class LossCallError(InputError):
    """The audited loss raised, or returned something that is not a loss."""


@dataclass(frozen=True)
class Item:
    """One value beside the loss; `name` is its key or attribute, or "item 1" for the second entry of a tuple."""

    name: str
    value: Tensor | float


@dataclass(frozen=True)
class LossOutput:
    """`loss` as returned, and everything numeric beside it."""

    loss: Tensor
    items: tuple[Item, ...] = ()


def read_output(returned: Any, name: str, logits_entries: int = 0) -> LossOutput:
    """Accept a tensor, a tuple, a mapping or an object with `.loss`.

    The loss is the entry named `loss` (`total_loss`, `total`), else the first entry; an entry as large as the logits
    in front of it is passed over, as in models that return (logits, loss).
    """
    if isinstance(returned, Tensor):
        return LossOutput(returned)
    entries = list(_entries(returned))
    if not entries:
        raise LossCallError(
            f"{name} returned {_describe(returned)}, but a loss is expected: a scalar tensor, a tuple whose first item is "
            "the loss, or an object with `.loss`."
        )
    index = _position(entries, logits_entries)
    loss = entries[index][1]
    if not isinstance(loss, Tensor):
        raise LossCallError(
            f"{name} gives {_describe(loss)} as its loss, but a tensor with a gradient is expected: "
            "return the loss before `.item()` or `float()`."
        )
    beside = (entry for i, entry in enumerate(entries) if i != index)
    items = (Item(key, number) for key, value in beside if (number := _number(value)) is not None)
    return LossOutput(loss, tuple(items))


def _entries(returned: Any) -> Iterator[tuple[str, Any]]:
    """Named entries, those of a nested mapping or tuple after the others' names."""
    if isinstance(returned, Mapping):
        pairs = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple) and (fields := getattr(returned, "_fields", None)):
        pairs = list(zip(fields, returned, strict=True))
    elif isinstance(returned, (tuple, list)):
        pairs = [(f"item {i}", value) for i, value in enumerate(returned)]
    elif any(hasattr(returned, key) for key in LOSS_NAMES):
        pairs = [(key, getattr(returned, key)) for key in _attributes(returned)]
    else:
        return
    for key, value in pairs:
        if isinstance(value, (Mapping, tuple, list)) and not key.startswith("_"):
            yield from ((inner if key.startswith("item") else f"{key}.{inner}", x) for inner, x in _entries(value))
        else:
            yield key, value


def _attributes(returned: Any) -> list[str]:
    if dataclasses.is_dataclass(returned):
        names = [field.name for field in dataclasses.fields(returned)]
    else:
        names = [key for key in getattr(returned, "__dict__", {}) if not key.startswith("_")]
    known = [key for key in (*LOSS_NAMES, *Z_NAMES, "cross_entropy", "ce") if hasattr(returned, key)]
    return [*names, *(key for key in known if key not in names)]


def _position(entries: list[tuple[str, Any]], logits_entries: int) -> int:
    names = [key for key, _ in entries]
    for key in LOSS_NAMES:
        if key in names:
            return names.index(key)
    for index, (_, value) in enumerate(entries):
        wide = isinstance(value, Tensor) and value.dim() >= 2 and value.numel() >= logits_entries > 1
        if not wide:
            return index
    return 0


def _number(value: Any) -> Tensor | float | None:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
