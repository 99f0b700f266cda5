"""Whether bf16 products run on this CPU: some machines announce instructions that then kill the process.

Nothing here imports torch: a process that has loaded it can no longer be told to avoid those instructions.
"""

from __future__ import annotations

import os
import subprocess
import sys

from zloss.errors import InputError

VARIABLE, SAFE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
PROBE = (
    "import torch\n"
    "a = torch.ones(64, 64, dtype=torch.bfloat16)\n"
    "x = torch.ones(8, 64, requires_grad=True)\n"
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n"
    "    torch.nn.functional.linear(x, torch.ones(64, 64)).sum().backward()\n"
    "assert float((a @ a)[0, 0]) == 64\n"
)


def bf16_runs(environment: dict[str, str]) -> bool:
    """Whether a small bf16 product survives in a process with this environment."""
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def make_bf16_safe() -> str | None:
    """Probe bf16 before torch is loaded, and limit oneDNN where that helps; what was done, or None if nothing had to be."""
    if bf16_runs(dict(os.environ)):
        return None
    if VARIABLE not in os.environ and bf16_runs({**os.environ, VARIABLE: SAFE}):
        if "torch" in sys.modules:
            raise InputError(
                f"bf16 products die on this CPU (it announces instructions it does not have): "
                f"set {VARIABLE}={SAFE} before torch is imported, or train with --precision fp32."
            )
        os.environ[VARIABLE] = SAFE
        return f"bf16 products die on this CPU as it is set up, so {VARIABLE}={SAFE} is used."
    raise InputError("bf16 products do not run on this CPU: train with --precision fp32.")
