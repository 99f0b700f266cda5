"""How much memory the graphs of layers may take, so that layers need no recomputation where memory allows.

The rule: a quarter of the memory that is free when the room is made. On the CPU that is what the kernel calls available, or
what the limit of the control group leaves if that is less; on a GPU it is free device memory. Where neither is known, none.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

SHARE = 0.25
"""Part of the free memory that graphs may take."""


class GraphRoom:
    """Bytes that are left; a graph that was kept gives none back, because all graphs are freed at the end."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    @classmethod
    def of_device(cls, device: torch.device) -> GraphRoom:
        """A quarter of the memory that is free now."""
        return cls(int(SHARE * free_bytes(device)))

    def take(self, size: int) -> bool:
        """Whether a graph of `size` bytes fits; if so, its bytes are taken."""
        fits = 0 < size <= self.left
        self.left -= size if fits else 0
        return fits


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Inside, autograd keeps nothing, and `total` counts the bytes that it would keep beside the parameters of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.total = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        super().__init__(self._count, lambda nothing: nothing)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; 0 where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0
    return min(_available(Path("/proc/meminfo")), _below_limit(Path("/sys/fs/cgroup")))


def _available(meminfo: Path) -> int:
    """MemAvailable of Linux, in bytes."""
    try:
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        return 1024 * int(line.split()[1])
    except (OSError, StopIteration, ValueError):
        return 0


def _below_limit(group: Path) -> int:
    """What the limit of the control group leaves, in bytes; a large number without a limit."""
    try:
        return max(0, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return 2**62
