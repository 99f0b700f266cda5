"""What a contributed figure must say about the machine: GPU, driver, versions, commit. No path of the machine."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu.record import Machine

PACKAGES = ("zloss", "torch", "triton", "liger-kernel", "flash-attn", "cut-cross-entropy")
ROOT = Path(__file__).parents[2]


def describe_machine(device: torch.device) -> Machine:
    """The device and what drives it."""
    if device.type != "cuda":
        return Machine(platform.processor() or platform.machine(), device.type, None, None, None, None, True)
    properties = torch.cuda.get_device_properties(device)
    built = f"hip {torch.version.hip}" if torch.version.hip else torch.version.cuda
    capability = f"{properties.major}.{properties.minor}"
    return Machine(properties.name, device.type, capability, properties.total_memory, driver_version(), built, False)


def driver_version() -> str | None:
    """Version of the NVIDIA or AMD driver."""
    for words in (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["cat", "/sys/module/amdgpu/version"],
    ):
        lines = printed(words).splitlines()
        if lines:
            return lines[0].strip()
    return None


def package_versions() -> dict[str, str | None]:
    """Version of every package that takes part."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit, marked where tracked files differ from it."""
    head = printed(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip()
    if not head:
        return None
    changed = printed(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]).strip()
    return f"{head}+changes" if changed else head


def printed(words: list[str]) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
