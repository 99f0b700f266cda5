"""The result of `make gpu`, schema "zloss.gpu/1": which properties hold on the device, and how fast the losses are there."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import torch

from zloss.results.record import ResultRecord


@dataclass(frozen=True)
class Machine:
    """Where it ran."""

    device: str
    """Name of the GPU, or of the processor."""
    device_type: str
    """ "cuda" or "cpu"; ROCm counts as "cuda" in torch."""
    capability: str | None
    """Compute capability, such as "9.0"; None off CUDA."""
    memory_bytes: int | None
    """Memory of the GPU; None off CUDA."""
    driver: str | None
    """Version of the driver; None where it cannot be read."""
    cuda: str | None
    """Version of CUDA, or "hip" and its version, that torch was built with; None for a CPU build."""
    interpreted: bool
    """Whether Triton's kernels were interpreted on the CPU."""


@dataclass(frozen=True)
class Checked:
    """One case of one property test: the quantity whose error is largest relative to its bound."""

    law: str
    """Name of the property test."""
    case: str
    """Objective and options."""
    dtype: str
    """Dtype of the operands, after autocast."""
    backend: str
    """Backend as requested."""
    products: str
    """Option `products` as requested."""
    quantity: str
    """What was compared."""
    error: float | None
    """Relative error in norm; None where the case raised or gave a nonfinite number."""
    bound: float
    """Largest error allowed."""
    problem: str | None = None
    """First line of the exception; None where there was none."""

    @property
    def held(self) -> bool:
        """Whether the property holds in this case."""
        return self.problem is None and self.error is not None and self.error <= self.bound


@dataclass(frozen=True)
class LawLine:
    """All cases of one property test that share dtype, backend and products."""

    law: str
    """Name of the property test."""
    dtype: str
    """Dtype of the operands, after autocast."""
    backend: str
    """Backend as requested."""
    products: str
    """Option `products` as requested."""
    cases: int
    """Cases that were run."""
    failed: int
    """Cases in which the property does not hold."""
    worst: Checked
    """The case with the largest error relative to its bound; a failed one where there is one."""


@dataclass(frozen=True)
class Timed:
    """One loss at one shape, forward and backward."""

    name: str
    """The loss."""
    has_z: bool
    """Whether it computes a Z-loss."""
    tokens: int
    """T."""
    width: int
    """D."""
    vocab: int
    """V."""
    dtype: str
    """Dtype of operands."""
    best_ms: float | None
    """Shortest time over the rounds; None where it was not run."""
    median_ms: float | None
    """Median over the rounds; None where it was not run."""
    spread: float | None
    """Longest over shortest time; None where it was not run."""
    peak_bytes: int | None
    """Largest allocation beyond what was there before the call, gradients included; None where it was not read."""
    why_not: str | None = None
    """Why it was not run; None where it was."""


@dataclass(frozen=True)
class GpuReport(ResultRecord):
    """One machine."""

    SCHEMA: ClassVar[str] = "zloss.gpu/1"

    machine: Machine
    """Where it ran."""
    versions: dict[str, str | None]
    """Package → version; None where it is not installed."""
    commit: str | None
    """Commit of the repository, with "+changes" where files differ from it; None outside a repository."""
    command: str
    """Command line, without the folder of the files."""
    calls: int
    """Calls of the memory test."""
    rounds: int
    """Interleaved rounds of the timings."""
    started: str
    """ISO 8601 in UTC."""
    seconds: float
    """Wall-clock time."""
    quick: bool
    """Whether shapes and cases were cut down, as tests do."""
    laws: tuple[LawLine, ...]
    """Every property test that was run."""
    failures: tuple[Checked, ...]
    """Every case in which a property does not hold."""
    not_run: dict[str, str]
    """Property test → why it was not run here."""
    timings: tuple[Timed, ...]
    """Every loss at every shape."""


def law_lines(checked: list[Checked]) -> tuple[LawLine, ...]:
    """Cases joined by property test, dtype, backend and products, in the order in which they came."""
    groups: dict[tuple[str, str, str, str], list[Checked]] = {}
    for one in checked:
        groups.setdefault((one.law, one.dtype, one.backend, one.products), []).append(one)
    return tuple(
        LawLine(*key, len(cases), sum(not one.held for one in cases), max(cases, key=_badness))
        for key, cases in groups.items()
    )


def _badness(one: Checked) -> float:
    return float("inf") if one.error is None else one.error / one.bound if one.bound else float(one.error > 0)


# What a contributed figure must say about the machine: GPU, driver, versions, commit. No path of the machine.

PACKAGES = (
    "zloss",
    "torch",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "flash-attn",
    "cut-cross-entropy",
)
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
