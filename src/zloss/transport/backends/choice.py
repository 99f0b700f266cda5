"""The names of the backends, and which of them runs for given tensors."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from zloss.errors import UnknownNameError
from zloss.transport.backends.triton.availability import prefers_triton, require_triton

Backend = Literal["auto", "dense", "chunked", "triton"]
Chosen = Literal["dense", "chunked", "triton"]


def check_backend(backend: str) -> None:
    """The name is one of the backends'."""
    if not isinstance(backend, str) or backend not in get_args(Backend):
        raise UnknownNameError("backend", backend, get_args(Backend))


def resolve_backend(backend: Backend, device: torch.device, dtype: torch.dtype) -> Chosen:
    """The backend behind a name, for tensors on `device` that compute in `dtype`.

    "auto" is Triton on a GPU where it is installed and chunked everywhere else. A backend asked for by name runs, or an
    error says why it cannot.
    """
    if backend == "auto":
        return "triton" if prefers_triton(device, dtype) else "chunked"
    if backend == "triton":
        require_triton(device, dtype)
    return backend


def runs_in_triton(backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a loss with this backend goes through Triton. Nothing is checked: tensors may still be of a wrong kind."""
    return backend == "triton" or (backend == "auto" and prefers_triton(device, dtype))
