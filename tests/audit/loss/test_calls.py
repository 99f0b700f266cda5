"""What is not a loss, or not an option, ends in one clear sentence; what a loss does to the process is undone."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.audit.loss.zoo import ce, plain
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.calls import LossCallError, load_function
from zloss.cli.audit_loss import AuditLoss
from zloss.cli.main import main
from zloss.errors import InputError, MissingDependencyError

SCRIPT = """
import io, os, sys, tempfile, time
import torch
import torch.nn.functional as F

number = 3

def off(z, y):
    return F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().clamp(min=1)

def good(z, y):
    valid = y != -100
    return off(z, y) + 1e-4 * z.logsumexp(-1)[valid].square().sum() / valid.sum().clamp(min=1)

def twice(z, y):
    return 2 * good(z, y) - off(z, y)

def linear(h, w, y):
    return F.cross_entropy(h @ w.T, y)

def plain(z, y):
    return F.cross_entropy(z, y)

def raises(z, y):
    raise RuntimeError("boom")

def exits(z, y):
    sys.exit(0)

def sleeps(z, y):
    time.sleep(0.4)
    return good(z, y)

class Output:
    @property
    def loss(self):
        raise RuntimeError("no loss today")

def raising_property(z, y):
    return Output()

def own_word(z, y):
    raise ValueError("`target` is wrong")

def changes_folder(z, y):
    os.chdir("/")
    os.environ["LEFT_BEHIND"] = "1"
    return good(z, y)

def replaces_streams(z, y):
    print("noise")
    sys.stdout, sys.stderr = io.StringIO(), None
    return good(z, y)
"""
ON_IMPORT = "import os, sys, tempfile\nos.chdir(tempfile.gettempdir())\nsys.stdout = None\n"
BEST = "No finding: the gradient of this loss matches its value."


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_losses.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z, y: None, "returned None"),
        (lambda z, y: 3.0, "returned a float"),
        (lambda z, y: (3.0, 1.0), "returned a tuple"),
        (lambda z, y: torch.tensor(1.0), "without a gradient"),
        (lambda z, y: z.logsumexp(-1), "a scalar is expected.*per_token="),
        (lambda z, y: z.sum() * float("nan"), "not finite on ordinary logits"),
        (lambda z, y: (z - z).sum().sqrt(), "not finite on ordinary logits"),
        (lambda z, y: F.cross_entropy(z.cuda(), y.cuda()), "GPU"),
        (lambda z, y: 1 / 0, "ZeroDivisionError"),
        (lambda z: z.sum(), "TypeError"),
        ("raises", r"RuntimeError \(boom\)"),
        ("exits", "SystemExit"),
        ("raising_property", r"RuntimeError \(no loss today\)"),
        ("sized", r"logits \[64, 96\], target \[64\] in float32.*`tokens=` or `vocab=`"),
    ],
)
def test_what_is_not_a_loss_is_rejected_in_one_sentence(loss: Any, words: str, script: Path) -> None:
    if words == "GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if loss == "sized":
        loss = lambda z, y: z.view(7, -1).sum()  # noqa: E731
    with pytest.raises(LossCallError, match=words) as caught:
        audit_loss(load_function(f"{script}:{loss}") if isinstance(loss, str) else loss)
    assert "\n" not in str(caught.value)


LOGITS, TARGET = torch.randn(8, 30, generator=torch.Generator().manual_seed(0)), torch.zeros(8, dtype=torch.long)
NO_NUMBER = ("-100", 1.5, 10**30, True, None, float("nan"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fn": 3}, "`fn` is expected to be a callable"),
        ({"fn": None}, "`fn` is expected to be a callable"),
        ({"off": 3}, "`off` is expected to be a callable, but got int"),
        ({"per_token": "rows"}, "`per_token` is expected to be a callable, but got str"),
        ({"expect": {"coeff": 1e-4}}, "Did you mean 'coef'"),
        ({"expect": {"coef": "1e-4"}}, "finite number"),
        ({"expect": {"target": "log"}}, "'log_v'"),
        ({"expect": [1]}, "`expect`"),
        ({"target": TARGET}, "without `logits`"),
        ({"logits": LOGITS, "target": TARGET[:3]}, "rows of `logits`"),
        ({"logits": LOGITS, "target": TARGET + 30}, "class indices"),
        ({"logits": LOGITS, "target": TARGET.numpy()}, "`target`"),
        ({"logits": LOGITS, "target": TARGET.to("meta")}, "`target`"),
        ({"logits": LOGITS.numpy()}, "`logits`"),
        ({"logits": LOGITS.tolist()}, "`logits`"),
        ({"logits": LOGITS.to("meta")}, "`logits`"),
        ({"logits": LOGITS[0]}, "`logits`"),
        ({"logits": LOGITS[:0]}, "`logits`"),
        ({"logits": LOGITS[:, :1]}, "`logits`"),
        ({"logits": TARGET.view(2, 4)}, "`logits` is expected to be a floating tensor"),
        *(({"ignore_index": value}, "`ignore_index` is expected to be a whole number") for value in NO_NUMBER),
        *(({"seed": value}, "`seed` is expected to be a whole number") for value in (*NO_NUMBER, -1)),
        *(({"time_limit": value}, "`time_limit` is expected to be a positive number") for value in ("5", -1, True, float("nan"))),
        *(({"vocab": value}, "`vocab` is expected to be a whole number") for value in ("96", 1, 1.5)),
        ({"tokens": 1}, "`tokens`"),
        ({"softcap": 0.0}, "`softcap`"),
        ({"logit_scale": -1.0}, "`logit_scale`"),
        ({"vocab": 50, "valid_vocab": 80}, "`valid_vocab`"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_used_is_named_and_the_loss_is_not_blamed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        audit_loss(**{"fn": F.cross_entropy, **options})
    assert not isinstance(caught.value, LossCallError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_leave_the_source_open_and_nothing_else(value: float) -> None:
    audit = audit_loss(plain, logits=torch.full((8, 30), value), target=TARGET)
    assert audit.found == ()
    assert audit.source.delta_src is None
    assert "not finite" in (audit.source.reason or "")


def broken(z: Tensor, y: Tensor) -> Tensor:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("option", "function", "id", "words"),
    [
        ("off", broken, "not_off", "the loss 'broken' raised RuntimeError"),
        ("off", lambda z, y: None, "not_off", "returned None"),
        ("off", lambda z, y: ce(z, y).detach(), "not_off", "without a gradient"),
        ("per_token", broken, "upstream_ignored", "the loss 'broken' raised RuntimeError"),
        ("per_token", ce, "upstream_ignored", "one value for each of 64 targets"),
    ],
)
def test_a_broken_companion_of_a_loss_is_not_blamed_on_the_loss(
    option: str, function: Any, id: str, words: str
) -> None:
    audit = audit_loss(plain, **{option: function})
    assert audit.found == ()
    (one,) = (one for one in audit.findings if one.id == id)
    assert one.verdict == "not_applicable"
    assert words in one.sentence
    assert audit.source.delta_src is not None


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
        ("good", True, 0, BEST),
        ("plain", False, 0, "all_ignored_nonfinite"),
        ("plain", True, 1, ""),
        ("twice", False, 1, "counted_twice"),
    ],
)
def test_exit_codes_of_the_command(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, strict: bool, code: int, line: str
) -> None:
    out, coef = tmp_path / "out", None if function == "plain" else 1e-4
    command = AuditLoss(f"{script}:{function}", off=f"{script}:off", coef=coef, out=str(out), strict=strict)
    assert command.run([]) == code
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert data["schema"] == "zloss.loss-audit/2"
    assert (out / "report.html").read_text(encoding="utf-8").count("all_ignored_nonfinite") >= 1
    assert line in capsys.readouterr().out


def test_a_call_that_takes_too_long_is_given_up_when_it_returns(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert main(["audit-loss", f"{script}:sleeps", "--time-limit", "0.2"]) == 2
    assert time.monotonic() - started < 10
    error = capsys.readouterr().err
    assert "took 0 s" not in error
    assert "--time-limit" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [("--coef", "inf"), ("--coef", "nan"), ("--target", "nan"), ("--target=-inf",)])
def test_expectations_are_finite_numbers(
    script: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit-loss", f"{script}:good", *words]) == 2
    assert "is expected to be a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "linear", "words"), [("linear", False, "with `linear=True`"), ("good", True, "without `linear`")]
)
def test_a_forgotten_or_superfluous_flag_is_named(script: Path, function: str, linear: bool, words: str) -> None:
    with pytest.raises(InputError, match=words):
        audit_loss(load_function(f"{script}:{function}"), linear=linear)
    with pytest.raises(InputError, match=words.replace("`linear=True`", "--linear").replace("`linear`", "--linear")):
        AuditLoss(f"{script}:{function}", linear=linear).run([])


def test_a_word_of_the_loss_was_printed_as_a_flag(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-loss", f"{script}:own_word"]) == 2
    error = capsys.readouterr().err
    assert "'target' is wrong" in error
    assert "--target" not in error


def test_a_folder_that_cannot_be_written_is_refused_before_the_loss_is_called(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused after the whole audit."""
    (tmp_path / "file").write_text("in the way")
    assert main(["audit-loss", f"{script}:raises", "--out", str(tmp_path / "file" / "out")]) == 2
    error = capsys.readouterr().err
    assert "is not a writable folder" in error
    assert "--out" in error


# What a loss does to the process.


def test_a_loss_that_changes_folder_and_environment_does_not_move_out(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report was written below the folder that the loss, or its module, had changed to."""
    script.write_text(ON_IMPORT + SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["audit-loss", "their_losses.py:changes_folder", "--out", "result"]) == 0
    assert os.getcwd() == str(tmp_path)
    assert "LEFT_BEHIND" not in os.environ
    assert json.loads((tmp_path / "result/report.json").read_text(encoding="utf-8"))["identified"]["has_z"] is True
    assert "result/report.json" in capsys.readouterr().out


def test_a_loss_that_replaces_stdout_does_not_silence_the_command(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    streams = sys.stdout, sys.stderr
    assert main(["audit-loss", f"{script}:replaces_streams"]) == 0
    assert (sys.stdout, sys.stderr) == streams
    assert BEST in capsys.readouterr().out


def test_a_file_can_import_its_neighbors(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "losses.py").write_text("from their_losses import good\n", encoding="utf-8")
    assert main(["audit-loss", f"{tmp_path}/losses.py:good"]) == 0
    assert BEST in capsys.readouterr().out


def test_the_callers_inputs_and_random_states_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    def loss(z: Tensor, y: Tensor) -> Tensor:
        chance = random.random() * numpy.random.rand()  # noqa: NPY002
        z.add_(0.0)
        return F.cross_entropy(F.dropout(z.mul_(1.5), 0.1), y) * (1 + 0 * chance)

    before, logits = states(), LOGITS.clone()
    audit_loss(loss, logits=logits)
    assert states() == before
    assert torch.equal(logits, LOGITS)


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """As in Megatron's moe_utils."""
    return torch.mean(torch.square(torch.logsumexp(logits, dim=-1))) * z_loss_coeff


def test_a_router_loss_was_told_to_pass_its_per_token_variant() -> None:
    """Its coefficient was taken for targets."""
    with pytest.raises(InputError, match=r"takes \(logits, z_loss_coeff\) and no targets.*audit_router") as caught:
        audit_loss(z_loss_func)
    assert "\n" not in str(caught.value)


def test_a_router_loss_with_its_coefficient_bound_was_accused_of_a_leak() -> None:
    audit = audit_loss(lambda logits, target: z_loss_func(logits, 1e-3))
    assert audit.errors == ()
    assert (audit.identified.ce_denominator, audit.identified.coef) == ("none", pytest.approx(1e-3, rel=1e-9))
