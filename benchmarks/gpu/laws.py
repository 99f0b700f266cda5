"""All laws on one device, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.autocast import autocast
from benchmarks.gpu.checkpointing import checkpointing
from benchmarks.gpu.compiled import compiled
from benchmarks.gpu.confident import confident
from benchmarks.gpu.edges import edges
from benchmarks.gpu.every_option import QUICK, Sweep, every_option
from benchmarks.gpu.graphs import graphs
from benchmarks.gpu.logits import logits
from benchmarks.gpu.memory import flat_memory
from benchmarks.gpu.record import Checked
from benchmarks.gpu.source import source
from tests.quick_interpreter import make_interpreter_quick
from zloss.errors import ZlossError
from zloss.head.options import Backend, require_triton

CALLS = 10_000


def usable_backends(device: torch.device) -> tuple[tuple[Backend, ...], dict[str, str]]:
    """(backends that run here, law → why it is not run)."""
    try:
        require_triton(device, torch.float32)
    except ZlossError as error:
        return ("dense", "chunked"), {"everything in Triton": str(error)}
    return ("dense", "chunked", "triton"), {}


def all_laws(device: torch.device, *, quick: bool, calls: int, say: Callable[[str], None]) -> Iterator[Checked]:
    """Every case of every law; `say` hears when a law begins."""
    sweep = QUICK if quick else Sweep()
    backends, _ = usable_backends(device)
    if "triton" in backends and device.type == "cpu":
        make_interpreter_quick()
    # Interpreted kernels take milliseconds per row: the long law leaves them out.
    without_interpreter = tuple(name for name in backends if name != "triton" or device.type == "cuda")
    laws: dict[str, Iterator[Checked]] = {
        "every option against fp64": every_option(device, sweep, backends),
        "source at the logits": source(device, sweep, backends),
        "losses of logits": logits(device, sweep, backends),
        "autocast": autocast(device, sweep, backends),
        "edges": edges(device, sweep, backends),
        "Z of confident tokens": confident(device, without_interpreter),
        "torch.compile": compiled(device, sweep, backends),
        "CUDA graphs": graphs(device, sweep, backends),
        "gradient checkpointing": checkpointing(device, sweep, backends),
        f"{calls} calls with flat memory": flat_memory(device, sweep, without_interpreter, calls),
    }
    for name, law in laws.items():
        say(name)
        yield from law
