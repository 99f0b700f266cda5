"""Whether native bf16 matrix products survive on this CPU, and a way around where they do not.

Some virtual machines advertise AMX and then trap on it: oneDNN's bf16 product dies with an illegal instruction, and the
process with it. oneDNN reads its instruction set once, before its first product, so an environment variable helps only a
process that is started with it; inside this one oneDNN can be left out, at about a fifth of the speed.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PROBE = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(a, a)"
ISA_VARIABLE, SAFE_ISA = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
ADVICE = (
    "bf16 products of oneDNN die on this CPU, so they ran without it, more slowly: "
    f"start with {ISA_VARIABLE}={SAFE_ISA} in the environment to use it"
)


@functools.cache
def native_bf16_products_work() -> bool:
    """Asked of a child process, which may die of the answer; it inherits this process's environment."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False).returncode == 0


@contextmanager
def working_bf16_products(note: Callable[[str], None] = lambda sentence: None) -> Iterator[None]:
    """Inside, bf16 matrix products on the CPU do not kill the process; `note` is told when oneDNN had to be left out."""
    if native_bf16_products_work():
        yield
        return
    note(ADVICE)
    with warnings.catch_warnings():
        # Touching the flags makes torch speak of TF32 on GPUs that are not here.
        warnings.simplefilter("ignore", UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield
