"""When the Triton backend runs, what stands in its way, and what the error says about it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from zloss.errors import UnknownNameError
from zloss.transport.backend import resolve_backend
from zloss.transport.triton.availability import INSTALLED, prefers_triton

LOSS = "zloss.{}(torch.randn(3, 7), {} torch.tensor([1, 2, 3]), zloss.StandardZLoss(1e-4), backend={!r})"


def answer(code: str, *, installed: bool = True) -> str:
    """What a fresh process without TRITON_INTERPRET prints; None in sys.modules is how Python says "not there"."""
    hide = "" if installed else "import sys; sys.modules['triton'] = None; "
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = (
        f"{hide}import torch, zloss\n"
        f"try:\n    print({code})\n"
        "except zloss.errors.ZlossError as e:\n    print(type(e).__name__, e)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


CALLS = {
    "logits_loss": LOSS.format("logits_loss", "", "triton"),
    "head_loss": LOSS.format("head_loss", "torch.randn(5, 7),", "triton"),
    "head_source": LOSS.format("head_source", "torch.randn(5, 7),", "triton"),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_triton_the_error_says_how_to_get_it(name: str) -> None:
    text = answer(CALLS[name], installed=False)
    assert text.startswith("MissingDependencyError")
    assert "pip install 'zloss[triton]'" in text


def test_without_triton_the_automatic_choice_falls_back() -> None:
    assert "HeadLossOutput" in answer(CALLS["head_loss"].replace("'triton'", "'auto'"), installed=False)
    code = "__import__('zloss.transport.backend', fromlist=['x']).resolve_backend('auto', torch.device('cuda'), torch.float32)"
    assert answer(code, installed=False).strip() == "chunked"


@pytest.mark.skipif(not INSTALLED, reason="triton is not installed: pip install 'zloss[triton]'")
@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu_the_error_names_the_interpreter(name: str) -> None:
    text = answer(CALLS[name])
    assert text.startswith("DeviceError")
    assert "TRITON_INTERPRET=1" in text
    assert "backend='chunked'" in text


def test_the_automatic_choice_off_a_gpu_and_in_fp64_is_chunked() -> None:
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "chunked"
    assert not prefers_triton(torch.device("cuda"), torch.float64)
    assert not prefers_triton(torch.device("mps"), torch.float32)


def test_unknown_backend() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'triton'"):
        resolve_backend("trition", torch.device("cpu"), torch.float32)
