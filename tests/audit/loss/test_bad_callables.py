"""Callables that are not losses end in one clear sentence; the command line never shows a traceback."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.audit.loss import calls, sizes
from zloss.audit.loss.calls import load_function
from zloss.audit.loss.audit import audit_loss
from zloss.cli.audit_loss import AuditLoss
from zloss.cli.main import main
from zloss.errors import InputError, MissingDependencyError
from zloss.results.loss_audit import LossAudit

SCRIPT = """
import sys
import threading
import time
import torch
import torch.nn.functional as F

number = 3

def good(z, y):
    valid = y != -100
    count = valid.sum().clamp(min=1)
    return F.cross_entropy(z, y, reduction="sum") / count + 1e-4 * z.logsumexp(-1)[valid].square().sum() / count

def twice(z, y):
    return 2 * good(z, y) - off(z, y)

def linear(h, w, y):
    return F.cross_entropy(h @ w.T, y)

def bare_assert(z, y):
    assert z.dim() == 7

def off(z, y):
    return F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().clamp(min=1)

def plain(z, y):
    return F.cross_entropy(z, y)

def raises(z, y):
    raise RuntimeError("boom")

def exits(z, y):
    sys.exit(0)

def loops(z, y):
    while True:
        pass

def sleeps(z, y):
    time.sleep(1000)

def waits(z, y):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def swallows(z, y):
    while True:
        try:
            time.sleep(1000)
        except Exception:
            pass

class Output:
    @property
    def loss(self):
        raise RuntimeError("no loss today")

def raising_property(z, y):
    return Output()

def third_has_a_default(z, y, coef=0.0):
    return F.cross_entropy(z, y)

def head_with_a_default(hidden, weight, target=None):
    return F.cross_entropy(hidden @ weight.T, target)

def own_word(z, y):
    raise ValueError("`target` is wrong")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_losses.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y: None, "returned None, but"),
        (lambda z, y: 3.0, "float"),
        (lambda z, y: (3.0, 1.0), "tensor with a gradient"),
        (lambda z, y: torch.tensor(1.0), "without a gradient"),
        (lambda z, y: z.logsumexp(-1), "scalar is expected"),
        (lambda z, y: z.sum() * float("nan"), "non-finite loss"),
        (lambda z, y: (z - z).sum().sqrt(), "non-finite gradient"),
        (lambda z, y: F.cross_entropy(z.cuda(), y.cuda()), "GPU"),
        (lambda z, y: 1 / 0, "ZeroDivisionError"),
        (lambda z: z.sum(), "TypeError"),
        ("raises", "RuntimeError: boom"),
        ("exits", "SystemExit"),
        ("raising_property", "RuntimeError: no loss today"),
        ("bare_assert", r"AssertionError at `assert z.dim\(\) == 7`.*logits \[64, 96\], target \[64\] in float32"),
    ],
)
def test_what_is_not_a_loss_is_rejected_in_one_sentence(loss: Any, words: str, script: Path) -> None:
    if words == "GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match=words) as caught:
        audit_loss(load_function(f"{script}:{loss}") if isinstance(loss, str) else loss)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fn": 3}, "callable"),
        ({"expect": {"coeff": 1e-4}}, "Did you mean 'coef'"),
        ({"target": torch.zeros(3, dtype=torch.long)}, "without `logits`"),
        ({"logits": torch.randn(4, 9), "target": torch.zeros(3, dtype=torch.long)}, "rows of `logits`"),
        ({"logits": torch.randn(4, 9), "target": torch.full((4,), 9)}, "class indices"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        audit_loss(**{"fn": F.cross_entropy, **options})


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="JAX is installed")
def test_a_jax_loss_without_jax_is_one_sentence() -> None:
    words = r"Auditing a JAX loss needs the package 'jax>=0.8', which is not installed: pip install 'zloss\[jax\]'"
    with pytest.raises(MissingDependencyError, match=words):
        audit_loss(F.cross_entropy, jax=True)


def test_a_loss_that_wants_a_batch_axis_is_given_one() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        assert z.dim() == 3
        return F.cross_entropy(z.transpose(1, 2), y)

    assert audit_loss(loss).identified.ce_denominator == "valid"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_at_all:f", "cannot import"),
        ("torch:no_such_name", "unknown name"),
        ("f", "MODULE:FUNCTION"),
        ("a.py:f", "does not exist"),
        ("torch.nn:CrossEntropyLoss", r"is a class, not a loss: .*`loss = CrossEntropyLoss\(…\)`"),
        ("{script}:number", "is of type int, not a function"),
        ("{script}:plane", "Did you mean 'plain'"),
        # A far-fetched name was suggested.
        ("{script}:nothere", "^(?!.*Did you mean)"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, words: str, script: Path) -> None:
    with pytest.raises(InputError, match=words):
        AuditLoss(name.format(script=script)).run([])


@pytest.mark.parametrize(
    ("function", "strict", "code", "line"),
    [
        ("good", True, 0, "No finding: the gradient of this loss matches its value."),
        ("plain", False, 0, "No errors in what this loss trains; 1 warning (all_ignored_nonfinite)."),
        ("plain", True, 1, "No errors in what this loss trains; 1 warning (all_ignored_nonfinite)."),
        ("twice", False, 1, "1 error (counted_twice)."),
    ],
)
def test_exit_codes_of_the_command(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, strict: bool, code: int, line: str
) -> None:
    out = tmp_path / "out"
    command = AuditLoss(
        f"{script}:{function}",
        off=f"{script}:off",
        coef=None if function == "plain" else 1e-4,
        out=str(out),
        strict=strict,
    )
    assert command.run([]) == code
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["schema"] == "zloss.loss-audit/1"
    assert (out / "report.html").read_text(encoding="utf-8").count("all_ignored_nonfinite") >= 1
    printed = capsys.readouterr().out
    assert line in printed


@pytest.mark.parametrize("hang", ["loops", "sleeps", "waits", "swallows"])
def test_a_loss_that_hangs_is_given_up(script: Path, hang: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It hung for good, whatever it waited for."""
    started = time.monotonic()
    assert main(["audit-loss", f"{script}:{hang}", "--time-limit", "0.3"]) == 2
    assert time.monotonic() - started < 20
    error = capsys.readouterr().err
    assert "did not return within 0.3 seconds" in error
    assert "--time-limit" in error
    assert len(error.strip().splitlines()) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("words", [("--coef", "inf"), ("--coef", "nan"), ("--target", "nan"), ("--target=-inf",)])
def test_expectations_are_finite_numbers(
    script: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit-loss", f"{script}:good", *words]) == 2
    assert "is expected to be a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "linear", "words"),
    [
        ("linear", False, "three arguments.*`linear=True`"),
        ("good", True, "two arguments"),
        # With a default on the third parameter the wrong call is accepted, and torch complained of shapes.
        ("third_has_a_default", True, r"Does it take \(logits, target\)\? Then leave out `linear=True`\."),
        ("head_with_a_default", False, r"Does it take \(hidden, weight, target\)\? Then pass `linear=True`\."),
        ("raises", False, "^(?!.*Does it take)"),
    ],
)
def test_a_forgotten_or_superfluous_flag_is_named(
    script: Path, function: str, linear: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An error about shapes is answered with other sizes: two of each kind, of which the last is large.
    monkeypatch.setattr(calls, "COMMON_TOKENS", (128, 2048))
    monkeypatch.setattr(calls, "COMMON_VOCABS", (1000, 50257))
    with pytest.raises(InputError, match=words):
        audit_loss(load_function(f"{script}:{function}"), linear=linear)
    with pytest.raises(InputError, match=words.replace("`linear=True`", "--linear")):
        AuditLoss(f"{script}:{function}", linear=linear).run([])


def test_a_word_of_the_loss_was_printed_as_a_flag(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-loss", f"{script}:own_word"]) == 2
    error = capsys.readouterr().err
    assert "'target' is wrong" in error
    assert "--target" not in error


def test_a_size_that_was_left_out_for_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BUDGET", 0.0)
    audit = audit_loss(F.cross_entropy)
    sentence = next(finding.sentence for finding in audit.findings if finding.id == "size_dependent")
    assert "Not tried" in sentence or "No other size was tried" in sentence


def test_an_old_record_without_severities_is_read() -> None:
    data = audit_loss(F.cross_entropy).to_dict()
    for finding in data["findings"]:
        del finding["severity"]
    for key in ("reason", "ce_weights", "z_weights", "targets"):
        del data["identified"][key]
    assert LossAudit.from_dict(data).identified.has_z is False
    with pytest.raises(InputError, match="schema"):
        LossAudit.from_dict({**data, "schema": "zloss.audit/1"})


def test_a_folder_that_cannot_be_written_is_refused_before_the_loss_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused after the whole audit."""
    script = tmp_path / "losses.py"
    script.write_text("def loss(z, y):\n    raise AssertionError('the loss was called')\n")
    (tmp_path / "file").write_text("in the way")
    assert main(["audit-loss", f"{script}:loss", "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert "is not a writable folder" in error
    assert "--out" in error
