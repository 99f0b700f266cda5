"""Keep a function out of torch.compile's trace: compiled code around it breaks its graph there and continues after it.

Checks that read values and buffers that are written in place cannot be traced. `torch.compiler.disable` excludes a
function from the trace, but it imports torch._dynamo when it decorates, which takes seconds. Here it is called only once
torch._dynamo has been imported by the code that compiles.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """The function itself while nothing is being compiled, its untraced form once torch.compile is in use."""
    return outside_compile_unless(lambda *args, **kwargs: False)(function)


def outside_compile_unless(traceable: Callable[..., bool]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`outside_compile`, except for calls whose arguments `traceable` accepts: those join the compiled graph."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        untraced: list[Callable[P, R]] = []

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if torch.compiler.is_compiling() and traceable(*args, **kwargs):
                return function(*args, **kwargs)
            if not untraced:
                untraced.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
            return untraced[0](*args, **kwargs)

        return call

    return decorate
