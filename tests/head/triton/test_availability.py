"""When the Triton backend runs, what can prevent it, and what the error says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from zloss.head.options import TRITON_INSTALLED, prefers_triton, resolve_backend

LOSS = "zloss.{}(torch.randn(3, 7), {} torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4), backend={!r})"


def answers(*codes: str, installed: bool = True) -> list[str]:
    """What a fresh process without TRITON_INTERPRET prints; None in sys.modules makes an import fail."""
    lines = [] if installed else ["import sys", "sys.modules['triton'] = None"]
    lines += ["import torch, zloss", "from zloss.head.options import resolve_backend"]
    for code in codes:
        lines += [
            "try:",
            f"    print({code})",
            "except zloss.errors.ZlossError as e:",
            "    print(type(e).__name__, e)",
        ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CALLS = [
    LOSS.format("logits_loss", "", "triton"),
    LOSS.format("head_loss", "torch.randn(5, 7),", "triton"),
    LOSS.format("head_source", "torch.randn(5, 7),", "triton"),
]


def test_without_triton_the_error_says_how_to_get_it_and_the_automatic_choice_falls_back() -> None:
    automatic = [
        call.replace("'triton'", "'auto'").replace("head_source(", "head_loss(") + ".loss.dtype" for call in CALLS
    ]
    on_a_gpu = "resolve_backend('auto', torch.device('cuda'), torch.float32)"
    *refused, first, second, third, chosen = answers(*CALLS, *automatic, on_a_gpu, installed=False)
    for text in refused:
        assert text.startswith("MissingDependencyError")
        assert "pip install 'zloss[triton]'" in text
    assert first == second == third == "torch.float32"
    assert chosen == "chunked"


@pytest.mark.skipif(not TRITON_INSTALLED, reason="triton is not installed: pip install 'zloss[triton]'")
def test_on_the_cpu_the_error_names_the_interpreter() -> None:
    found = answers(*CALLS)
    assert len(found) == len(CALLS)
    for text in found:
        assert text.startswith("DeviceError")
        assert "TRITON_INTERPRET=1" in text
        assert "backend='chunked'" in text


def test_the_automatic_choice_off_a_gpu_and_in_fp64_is_chunked() -> None:
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "chunked"
    assert not prefers_triton(torch.device("cuda"), torch.float64)
    assert not prefers_triton(torch.device("mps"), torch.float32)
