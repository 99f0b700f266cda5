"""What a user believes of a loss: a right belief passes, and nothing passes that another finding denies."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zloss
from tests.audit.loss import faulty
from zloss.audit.loss.audit import audit_loss
from zloss.cli.main import main
from zloss.errors import InputError
from zloss.results.loss_audit import Finding

SCRIPT = """
import torch
import torch.nn.functional as F
import zloss

def right(logits, target):
    return zloss.logits_loss(logits, target, zloss.StandardZLoss(1e-4)).loss

def plain(logits, target):
    return F.cross_entropy(logits, target)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_losses.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def follows_log_v(z: Tensor, y: Tensor) -> Tensor:
    return zloss.logits_loss(z, y, zloss.StandardZLoss(1e-4)).loss


def constant_target(z: Tensor, y: Tensor) -> Tensor:
    return zloss.logits_loss(z, y, zloss.StandardZLoss(1e-4, target=math.log(96))).loss


def detached(target: float | None) -> Any:
    def loss(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        c = math.log(z.shape[-1]) if target is None else target
        penalty = 1e-4 * (z.detach().logsumexp(-1)[y != -100] - c).square().mean()
        return F.cross_entropy(z, y) + penalty, penalty

    return loss


def finding(loss: Any, id: str, **options: Any) -> Finding:
    return next(one for one in audit_loss(loss, **options).findings if one.id == id)


@pytest.mark.parametrize("word", ["log_v", "log V", "logV"])
def test_log_v_could_not_be_expected_by_its_name(word: str) -> None:
    assert finding(follows_log_v, "differs_from_expected", expect={"coef": 1e-4, "target": word}).verdict == "pass"


@pytest.mark.parametrize(
    ("loss", "expect", "words"),
    [
        # A target may be expected without a coefficient.
        (constant_target, {"target": "log_v"}, "c does not follow log V"),
        (constant_target, {"target": 6.0}, "^(?!.*log_v)"),
        # A number for log V was rejected without the vocabulary of the probe.
        (follows_log_v, {"coef": 1e-4, "target": math.log(512)}, "V is 96 here.*'log_v'"),
    ],
)
def test_another_target_than_the_expected_one_is_named(loss: Any, expect: dict[str, Any], words: str) -> None:
    one = finding(loss, "differs_from_expected", expect=expect)
    assert one.verdict == "finding"
    assert re.search(words, one.sentence)


def test_a_word_that_is_no_target_is_answered_with_the_word_that_is() -> None:
    with pytest.raises(InputError, match="'log_v'"):
        audit_loss(follows_log_v, expect={"target": "log"})


def test_the_command_took_only_numbers_for_the_target(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-loss", f"{script}:right", "--coef", "1e-4", "--target", "log_v"]) == 0
    assert "No finding: the gradient of this loss matches its value." in capsys.readouterr().out
    assert main(["audit-loss", f"{script}:right", "--target", "logarithm"]) == 2
    error = capsys.readouterr().err
    assert "--target is expected" in error
    assert "'log_v'" in error


@pytest.mark.parametrize(
    ("loss", "expect", "see"),
    [
        (detached(0.0), {"coef": 1e-4}, "zero_gradient_z"),
        (faulty.only_cross_entropy, {"coef": 1e-4, "target": 0.0}, "zero_gradient_z"),
        (faulty.only_cross_entropy, {"target": 0.0}, "no Z to compare"),
        (faulty.z_added_again, faulty.EXPECT, "counted_twice"),
    ],
)
def test_what_another_finding_denies_passed_as_expected(loss: Any, expect: dict[str, Any], see: str) -> None:
    one = finding(loss, "differs_from_expected", expect=expect)
    assert one.verdict == "not_applicable"
    assert see in one.sentence


def test_a_missing_z_next_to_token_weights_passed_as_expected() -> None:
    """There the value cannot be predicted, so that zero_gradient_z has no answer."""

    def weighted(z: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(z, y, reduction="none") * (1 + y % 3).to(z)).mean()

    audit = audit_loss(weighted, expect={"coef": 1e-4})
    assert audit.identified.has_z is False
    verdicts = {one.id: one.verdict for one in audit.findings}
    assert verdicts["zero_gradient_z"] == "not_applicable"
    assert verdicts["differs_from_expected"] == "finding"


@pytest.mark.parametrize(
    ("target", "expect", "words"),
    [
        (0.0, {"coef": 1e-4}, "0.0001 times the mean of (log Z)², which is not trained"),
        (None, {}, "0.0001 times the mean of (log Z − log V)², which is not trained"),
        (3.0, {"target": 3.0}, "0.0001 times the mean of (log Z − 3)², which is not trained"),
        (3.0, {}, "a number that is not recognized"),
    ],
)
def test_the_value_of_a_detached_z_was_called_none_of_z(
    target: float | None, expect: dict[str, Any], words: str
) -> None:
    assert f"`item 1` is {words}" in finding(detached(target), "returned_values", expect=expect).sentence


def test_a_detached_z_under_the_name_of_a_z_is_an_error() -> None:
    def named(z: Tensor, y: Tensor) -> dict[str, Tensor]:
        total, penalty = detached(0.0)(z, y)
        return {"loss": total, "z_loss": penalty}

    assert finding(named, "reported_z_value").verdict == "finding"


def test_a_reported_z_that_is_nan_with_ignored_tokens_is_an_error() -> None:
    def named(z: Tensor, y: Tensor) -> dict[str, Tensor]:
        valid = y != -100
        penalty = 1e-4 * z[valid].logsumexp(-1).square().mean()
        logged = penalty.detach() if valid.all() else torch.full((), torch.nan)
        return {"loss": F.cross_entropy(z, y) + penalty, "z_loss": logged}

    assert "with ignored tokens it is nan" in finding(named, "reported_z_value").sentence


def test_the_table_of_the_command_spoke_python(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("zloss.audit.loss.sizes.BUDGET", 1e-9)
    assert main(["audit-loss", f"{script}:plain", "--verbose", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    for flag in ("--per-token", "--valid-vocab", "--coef λ --target c", "--off", "--thorough"):
        assert flag in printed
    assert not re.search(r"(expect|per_token|valid_vocab|thorough|linear|off)=", printed)
    written = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    sentences = " ".join(one["sentence"] for one in written["findings"])
    assert "`per_token=`" in sentences
    assert "--" not in sentences


def test_a_clean_loss_printed_a_screen_of_passes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit-loss", f"{script}:right", "--coef", "1e-4"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 12
    assert re.search(r"\d+ passed, \d+ not applicable; --verbose prints them\.", short)
    assert "No finding: the gradient of this loss matches its value." in short
    assert main([*words, "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert all(one in whole for one in ("zero_gradient_z", "padding_in_log_z", "not_repeatable"))
    assert "--verbose" not in whole
    assert main(["audit-loss", f"{script}:plain", "--coef", "1e-4"]) == 1
    found = capsys.readouterr().out
    assert "✗ error" in found
    assert "✓ pass" not in found
