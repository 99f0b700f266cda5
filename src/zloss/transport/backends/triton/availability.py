"""Whether the Triton backend can run here, found out without importing triton."""

from __future__ import annotations

import importlib.util

import torch

from zloss.errors import DeviceError, DtypeError, MissingDependencyError

INSTALLED = importlib.util.find_spec("triton") is not None

_OLDEST_GENERATION = 8
"""The compute capability from which on Triton supports NVIDIA's cards; with older ones "auto" falls back."""


def prefers_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether backend="auto" takes Triton: a supported GPU, Triton installed, and fp32 statistics."""
    if device.type != "cuda" or dtype == torch.float64 or not INSTALLED:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_properties(device).major >= _OLDEST_GENERATION


def require_triton(device: torch.device, dtype: torch.dtype) -> None:
    """Raise an error where backend="triton" cannot run on these tensors; it says why and what to use instead."""
    if not INSTALLED:
        raise MissingDependencyError("triton", "backend='triton'", "triton")
    if dtype == torch.float64:
        raise DtypeError(
            "backend='triton' computes in fp32 from fp32, bf16 or fp16 tensors, but got fp64: "
            "use backend='chunked' or 'dense', which stay in fp64."
        )
    if device.type == "cuda":
        return
    if device.type != "cpu" or not interpreted():
        raise DeviceError(
            f"backend='triton' needs tensors on a GPU, but got {device}: use backend='chunked' there. To run the kernels "
            "interpreted on the CPU, as tests do, set TRITON_INTERPRET=1 before the first loss with backend='triton'."
        )


def interpreted() -> bool:
    """Whether the kernels run on the interpreter; Triton decides it when they are defined."""
    from zloss.transport.backends.triton.kernels import INTERPRETED

    return INTERPRETED
