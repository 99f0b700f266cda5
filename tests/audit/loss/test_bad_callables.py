"""Callables that are no losses end in one clear sentence; the command line never shows a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.loss.load import load_function
from zloss.audit.loss.run import audit_loss
from zloss.cli.audit_loss import AuditLoss
from zloss.errors import InputError

SCRIPT = """
import sys
import torch
import torch.nn.functional as F

number = 3

def good(z, y):
    valid = y != -100
    count = valid.sum().clamp(min=1)
    return F.cross_entropy(z, y, reduction="sum") / count + 1e-4 * z.logsumexp(-1)[valid].square().sum() / count

def off(z, y):
    return F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().clamp(min=1)

def plain(z, y):
    return F.cross_entropy(z, y)

def raises(z, y):
    raise RuntimeError("boom")

def exits(z, y):
    sys.exit(0)

def nan(z, y):
    return z.sum() * float("nan")

def vector(z, y):
    return z.logsumexp(-1)

def wants_cuda(z, y):
    return F.cross_entropy(z.cuda(), y.cuda())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_losses.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def _returns(value: Any) -> Any:
    return lambda z, y: value


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_returns(None), "None"),
        (_returns(3.0), "float"),
        (_returns((3.0, 1.0)), "tensor with a gradient"),
        (_returns(torch.tensor(1.0)), "without a gradient"),
        (lambda z, y: z.logsumexp(-1), "scalar is expected"),
        (lambda z, y: z.sum() * float("nan"), "non-finite loss"),
        (lambda z, y: (z - z).sum().sqrt(), "non-finite gradient"),
        (lambda z, y: F.cross_entropy(z.cuda(), y.cuda()), "GPU"),
        (lambda z, y: 1 / 0, "ZeroDivisionError"),
        (lambda z: z.sum(), "TypeError"),
    ],
)
def test_what_is_no_loss_is_refused_in_one_sentence(loss: Any, words: str) -> None:
    if words == "GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match=words) as caught:
        audit_loss(loss)
    assert "\n" not in str(caught.value)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="callable"):
        audit_loss(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Did you mean 'coef'"):
        audit_loss(F.cross_entropy, expect={"coeff": 1e-4})
    with pytest.raises(InputError, match="without `logits`"):
        audit_loss(F.cross_entropy, target=torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match="rows of `logits`"):
        audit_loss(F.cross_entropy, logits=torch.randn(4, 9), target=torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match="class indices"):
        audit_loss(F.cross_entropy, logits=torch.randn(4, 9), target=torch.full((4,), 9))


def test_a_loss_that_wants_a_batch_axis_is_given_one() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert z.dim() == 3
        return F.cross_entropy(z.transpose(1, 2), y)

    assert audit_loss(loss).identified.ce_denominator == "valid"


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    audit_loss(lambda z, y: F.cross_entropy(F.dropout(z, 0.1), y))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all:f", "cannot import"),
        ("torch:no_such_name", "unknown name"),
        ("f", "MODULE:FUNCTION"),
        ("a.py:f", "no file"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_function(name)


@pytest.mark.parametrize(("function", "code"), [("good", 0), ("plain", 1)])
def test_exit_codes_of_the_command(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, code: int
) -> None:
    out = tmp_path / "out"
    assert AuditLoss(f"{script}:{function}", off=f"{script}:off", out=str(out)).run() == code
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["schema"] == "zloss.loss-audit/1"
    assert (out / "report.html").read_text(encoding="utf-8").count("all_ignored_nonfinite") >= 1
    printed = capsys.readouterr().out
    assert ("No finding." in printed) == (code == 0)
    assert ("1 finding: all_ignored_nonfinite" in printed) == (code == 1)


@pytest.mark.parametrize("function", ["raises", "exits", "nan", "vector", "wants_cuda", "number", "missing"])
def test_the_command_refuses_without_a_traceback(script: Path, function: str) -> None:
    with pytest.raises(InputError):
        AuditLoss(f"{script}:{function}").run()


def test_the_module_of_the_command_does_not_import_torch() -> None:
    code = "import sys, zloss.cli.audit_loss; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
