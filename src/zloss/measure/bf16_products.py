"""Whether bf16 matrix products run on this CPU, and two ways around where they do not.

Some virtual machines advertise AMX and then trap on it: a bf16 product of oneDNN hits an illegal instruction, and the
operating system kills the process. oneDNN reads its instruction set once, before its first product. An environment variable
therefore helps only a process that has not loaded torch; a process that has can leave oneDNN out, at about a fifth of the
speed.

This file imports torch only inside the function that needs it, so that `make_bf16_safe` can run before torch is loaded.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from zloss.errors import InputError

ISA_VARIABLE, SAFE_ISA = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PROBE = (
    "import torch\n"
    "a = torch.ones(64, 64, dtype=torch.bfloat16)\n"
    "assert float(torch.nn.functional.linear(a, a)[0, 0]) == 64\n"
    "x = torch.ones(8, 64, requires_grad=True)\n"
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
    "    torch.nn.functional.linear(x, torch.ones(64, 64)).sum().backward()\n"
)
"""A plain product, and one under autocast with its backward pass."""
ADVICE = (
    "bf16 products of oneDNN hit an illegal instruction on this CPU, so they ran without oneDNN, more slowly: "
    f"start with {ISA_VARIABLE}={SAFE_ISA} in the environment to use it"
)


def bf16_products_run(environment: Mapping[str, str]) -> bool:
    """Whether small bf16 products run in a process with this environment.

    A child process tries them, because an illegal instruction kills the process that hits it.
    """
    words = [sys.executable, "-c", PROBE]
    return subprocess.run(words, env=dict(environment), capture_output=True, check=False).returncode == 0


@functools.cache
def native_bf16_products_work() -> bool:
    """Whether bf16 products run in the environment of this process."""
    return bf16_products_run(os.environ)


def make_bf16_safe() -> str | None:
    """Limit oneDNN's instruction set where bf16 products need it; what was done, or None if nothing had to be.

    To be called before torch is loaded: later the limit has no effect, and the error says how to set it.
    """
    if native_bf16_products_work():
        return None
    if ISA_VARIABLE in os.environ or not bf16_products_run({**os.environ, ISA_VARIABLE: SAFE_ISA}):
        raise InputError("bf16 products do not run on this CPU: use `precision` fp32.")
    if "torch" in sys.modules:
        raise InputError(
            "bf16 products hit an illegal instruction on this CPU: "
            f"set {ISA_VARIABLE}={SAFE_ISA} before torch is imported, or use `precision` fp32."
        )
    os.environ[ISA_VARIABLE] = SAFE_ISA
    native_bf16_products_work.cache_clear()
    return f"bf16 products hit an illegal instruction on this CPU, so {ISA_VARIABLE}={SAFE_ISA} is used."


def limit_before_torch(note: Callable[[str], None]) -> None:
    """`make_bf16_safe` if torch is not loaded yet; later nothing, for callers that use `working_bf16_products` as well."""
    if "torch" not in sys.modules:
        sentence = make_bf16_safe()
        if sentence:
            note(sentence)


@contextmanager
def working_bf16_products(note: Callable[[str], None] = lambda sentence: None) -> Iterator[None]:
    """Inside this context, bf16 matrix products work on the CPU; if oneDNN must be disabled for that, `note` gets a sentence."""
    if native_bf16_products_work():
        yield
        return
    import torch

    note(ADVICE)
    with warnings.catch_warnings():
        # Setting the flags makes torch warn about TF32 on GPUs.
        warnings.simplefilter("ignore", UserWarning)
        with torch.backends.mkldnn.flags(enabled=False):
            yield
