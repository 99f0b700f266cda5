"""The names of the backends, and which of them runs for given tensors."""

from __future__ import annotations

from typing import Literal, cast

import torch

from zloss.errors import UnknownNameError
from zloss.transport.backends.triton.availability import prefers_triton, require_triton

Backend = Literal["auto", "dense", "chunked", "triton"]
Chosen = Literal["dense", "chunked", "triton"]

_NAMES = ("auto", "dense", "chunked", "triton")


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> Chosen:
    """The backend behind a name, for tensors on `device` that compute in `dtype`.

    "auto" is Triton on a GPU where it is installed and chunked everywhere else; a backend asked for by name either runs
    or says why not.
    """
    if backend not in _NAMES:
        raise UnknownNameError("backend", backend, _NAMES)
    if backend == "auto":
        return "triton" if prefers_triton(device, dtype) else "chunked"
    if backend == "triton":
        require_triton(device, dtype)
    return cast(Chosen, backend)


def runs_in_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a loss with this backend goes through Triton, asked before anything is checked."""
    return backend == "triton" or (backend == "auto" and prefers_triton(device, dtype))
