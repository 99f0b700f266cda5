"""`zloss.testing`: right losses pass, findings of wrong ones are raised unless they are expected."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zloss
from tests.audit.loss import faulty
from zloss.audit.loss.checks import CHECKS
from zloss.cli.main import main
from zloss.errors import InputError, LossCheckError, UnknownNameError
from zloss.testing import check_loss, parametrize_with_checks

SOURCES = Path(zloss.__file__).parents[1]


def plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def over_all(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def mean_of_valid(rows: Tensor, target: Tensor) -> Tensor:
    return torch.where(target != -100, rows, 0.0).sum() / (target != -100).sum().clamp(min=1)


def capped(logits: Tensor, target: Tensor) -> Tensor:
    z = 30 * torch.tanh(logits / 30)
    return F.cross_entropy(z, target) + mean_of_valid(1e-3 * z.logsumexp(-1).square(), target)


def test_a_right_loss_passes_and_its_audit_comes_back() -> None:
    audit = check_loss(
        faulty.correct, coef=faulty.COEF, target=0.0, coordinate="raw", ce_denominator="valid", strict=True
    )
    assert audit.identified.has_z


@pytest.mark.parametrize(
    ("loss", "options", "id"),
    [
        (faulty.correct, {"coef": 0.7 * faulty.COEF}, "differs_from_expected"),
        (faulty.correct, {"target": "log_v"}, "differs_from_expected"),
        (faulty.correct, {"coordinate": "centered"}, "differs_from_expected"),
        (faulty.correct, {"z_denominator": "all"}, "denominator_mismatch"),
        (over_all, {}, "denominator_mismatch"),
    ],
)
def test_a_finding_is_raised_with_its_consequence_its_remedy_and_its_witness(
    loss: Any, options: dict[str, Any], id: str
) -> None:
    with pytest.raises(LossCheckError) as raised:
        check_loss(loss, **options)
    first, *lines = str(raised.value).splitlines()
    assert first == f"the loss {loss.__qualname__!r} does not pass its audit:"
    at = next(place for place, line in enumerate(lines) if line.startswith(f"error {id}: "))
    assert lines[at + 1] == f"    consequence: {CHECKS[id].consequence}"
    assert lines[at + 2] == f"    to do: {CHECKS[id].remedy}"
    assert re.search(
        r"expected .+, measured .+, noise \S+ \(probe '.+', T = \d+, V = \d+, float\d+, seed 0\)$", lines[at + 3]
    )


def test_notes_count_with_strict_only() -> None:
    check_loss(plain)
    with pytest.raises(LossCheckError, match="note all_ignored_nonfinite"):
        check_loss(plain, strict=True)


def test_an_expected_finding_does_not_raise() -> None:
    check_loss(plain, strict=True, expected={"all_ignored_nonfinite": "batches always have targets"})
    known = {"denominator_mismatch": "the paper does this", "ignored_tokens_leak": "likewise"}
    assert {one.id for one in check_loss(over_all, expected=known).errors} == known.keys()
    with pytest.raises(LossCheckError) as raised:
        check_loss(over_all, expected={"ignored_tokens_leak": "likewise"})
    assert "error denominator_mismatch" in str(raised.value)
    assert "ignored_tokens_leak" not in str(raised.value)


def test_an_expected_finding_that_is_gone_is_an_error_that_says_so() -> None:
    with pytest.raises(LossCheckError) as raised:
        check_loss(faulty.correct, expected={"overflow": "fp16 kernel"})
    assert "overflow is in `expected` (fp16 kernel), but was not found: " in str(raised.value)
    assert str(raised.value).endswith("Remove it from `expected`.")


def test_an_expected_finding_that_does_not_exist_is_refused_by_name() -> None:
    for check in (check_loss, parametrize_with_checks):
        with pytest.raises(UnknownNameError, match=r"'overflw'. Did you mean 'overflow'"):
            check(plain, expected={"overflw": ""})
        with pytest.raises(InputError, match="`expected` is expected to map ids"):
            check(plain, expected=["overflow"])  # type: ignore[arg-type]


def test_how_a_loss_is_called_is_passed_on() -> None:
    audit = check_loss(capped, coef=1e-3, target=0.0, coordinate="raw", softcap=30.0)
    assert audit.identified.coef == pytest.approx(1e-3)
    with pytest.raises(LossCheckError, match="not_off"):
        check_loss(faulty.correct, off=faulty.correct)
    audit = check_loss(lambda z, y: F.cross_entropy(z, y, ignore_index=0), ignore_index=0, tokens=32, vocab=80)
    assert (audit.provenance["probe_tokens"], audit.provenance["probe_vocab"]) == (32, 80)
    assert [one.id for one in audit.found if one.id == "other_ignore_index"] == []


def test_a_loss_may_be_named_by_its_place() -> None:
    audit = check_loss(f"{__file__}:plain", off=f"{__file__}:plain", coef=0.0)
    assert audit.provenance["loss"].endswith("test_testing.py:plain")


@parametrize_with_checks(
    over_all, coef=1e-3, expected={"denominator_mismatch": "on purpose", "ignored_tokens_leak": "too"}
)
def test_one_node_per_check(check: Any) -> None:
    check()


FILE = """
import torch
import torch.nn.functional as F
from zloss.testing import parametrize_with_checks

audits = []

def loss(logits, target):
    audits.append(1)
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()

@parametrize_with_checks(loss, expected={"overflow": "once", "denominator_mismatch": "known"})
def test_loss(check):
    check()

def test_the_audit_ran_once():
    assert 50 < len(audits) < 400

@parametrize_with_checks(lambda z, y: 1 / 0)
def test_broken(check):
    check()
"""


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of a separate pytest in a folder."""
    environment = os.environ | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "pytest", "-v", "-rf", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_in_pytest_every_check_is_one_node_and_the_audit_runs_once(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    code, printed = run_pytest(tmp_path)
    assert code == 1
    ended = dict(re.findall(r"::test_loss\[(\w+)\] (\w+)", printed))
    assert ended.keys() == CHECKS.keys()
    assert ended["denominator_mismatch"] == "XFAIL"
    assert (ended["overflow"], ended["ignored_tokens_leak"]) == ("FAILED", "FAILED")
    assert "[XPASS(strict)] once" in printed
    assert ended["zero_gradient_z"] == "PASSED"
    assert "::test_the_audit_ran_once PASSED" in printed
    assert set(re.findall(r"::test_broken\[\w+\] (\w+)", printed)) == {"FAILED"}


LOSSES = """
import torch
import torch.nn.functional as F

def leaky(logits, target):
    return F.cross_entropy(logits, target) + 1e-4 * logits.logsumexp(-1).square().mean()

def plain(logits, target):
    return F.cross_entropy(logits, target)

def scaled(hidden, weight, target):
    logits, count = hidden @ weight.T, (target != -100).sum().clamp(min=1)
    z = torch.where(target != -100, (logits - logits.mean(-1, keepdim=True)).logsumexp(-1).square(), 0.0)
    return (F.cross_entropy(logits.float(), target, reduction="sum") + 2e-3 * z.sum()) / count / 4

def huber(logits, target):
    return F.cross_entropy(logits, target) + F.smooth_l1_loss(logits.logsumexp(-1), torch.zeros(logits.shape[:-1]))
"""


WORDS = (
    "leaky --ignore-index 0",
    "plain --off losses.py:plain --seed 3",
    "plain --strict --coef 1e-3",
    "scaled --linear",
    "huber",
)


def test_the_printed_file_passes_and_fails_once_the_loss_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout has the file and nothing else; what was identified and found then is found again."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "moved.py").write_text(LOSSES)
    for number, words in enumerate([*WORDS, "leaky"]):
        file = "moved.py" if words == "leaky" else "losses.py"
        assert main(["audit-loss", *f"{file}:{words} --write-test".split()]) == 0
        (tmp_path / f"test_{number}.py").write_text(capsys.readouterr().out)
    written = (tmp_path / f"test_{len(WORDS)}.py").read_text()
    for line in ("coef=0.0001,", "target=0.0,", 'coordinate="raw",', 'ce_denominator="valid",', 'z_denominator="all",'):
        assert f"    {line}\n" in written
    assert '"denominator_mismatch": "λ relative to CE changes' in written
    assert "all_ignored_nonfinite" not in written
    (tmp_path / "moved.py").write_text(LOSSES.replace("1e-4", "1.3e-4"))
    code, printed = run_pytest(tmp_path)
    assert code == 1
    assert set(re.findall(r"^FAILED (\S+)", printed, re.MULTILINE)) == {
        f"test_{len(WORDS)}.py::test_leaky[differs_from_expected]"
    }
    assert "λ is 0.00013, not 0.0001" in printed
    assert len(re.findall(r"::test_\w+\[", printed)) >= (len(WORDS) + 1) * len(CHECKS)
