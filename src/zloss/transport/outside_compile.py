"""Keep a function out of torch.compile's trace: the compiled code around it breaks its graph there and goes on after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable with its type kept: checks that read values and in-place buffers do not trace."""
    return cast(Callable[P, R], torch.compiler.disable(function))  # type: ignore[no-untyped-call]
