"""The arguments of a call of a module by name, as its hooks need them: a hook gets positional ones without their names."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def given_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional ones too."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs
