"""What a user believes of a loss: a right belief passes, and nothing passes that another finding denies."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import zloss
from tests.audit.loss import faulty
from tests.audit.loss.zoo import ce, lse, mean, nll, plain
from zloss.audit.loss.audit import audit_loss
from zloss.cli.main import main
from zloss.results.loss_audit import Finding

SCRIPT = """
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


def differs(loss: Any, **options: Any) -> Finding:
    return next(one for one in audit_loss(loss, **options).findings if one.id == "differs_from_expected")


@pytest.mark.parametrize("word", ["logV", None])
def test_log_v_could_not_be_expected_by_its_name(word: str | None) -> None:
    assert differs(follows_log_v, expect={"coef": 1e-4, "target": word}).verdict == "pass"


@pytest.mark.parametrize(
    ("loss", "expect", "words"),
    [
        # A target may be expected without a coefficient.
        (constant_target, {"target": "log_v"}, "does not follow log V"),
        (constant_target, {"target": 6.0}, "^(?!.*log_v)"),
        # A number for log V was rejected without the vocabulary of the probe.
        (follows_log_v, {"coef": 1e-4, "target": math.log(512)}, "follows log V.*'log_v'"),
        (follows_log_v, {"coordinate": "centered"}, "coordinate is 'raw', not 'centered'"),
        (follows_log_v, {"label_smoothing": 0.1}, "label smoothing is 0, not 0.1"),
        (lambda z, y: ce(z, y) / 8 + 1e-4 * mean(lse(z) ** 2, y), {"coef": 1e-4 / 3.1}, "λ relative to CE is 0.0008"),
    ],
)
def test_what_differs_from_the_expected_one_is_named(loss: Any, expect: dict[str, Any], words: str) -> None:
    one = differs(loss, expect=expect)
    assert one.verdict == "finding"
    assert re.search(words, one.sentence)


def test_the_command_took_only_numbers_for_the_target(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit-loss", f"{script}:right", "--coef", "1e-4", "--target", "log_v"]) == 0
    assert "No finding: the gradient of this loss matches its value." in capsys.readouterr().out
    assert main(["audit-loss", f"{script}:right", "--target", "logarithm"]) == 2
    error = capsys.readouterr().err
    assert "--target is expected" in error
    assert "'log_v'" in error


@pytest.mark.parametrize(
    ("loss", "expect", "id"),
    [
        (faulty.detached_z, faulty.EXPECT, "zero_gradient_z"),
        (faulty.only_cross_entropy, faulty.EXPECT, "zero_gradient_z"),
        (faulty.z_added_again, faulty.EXPECT, "counted_twice"),
        # Token weights: the value cannot be predicted there.
        (lambda z, y: (nll(z, y) * (1 + y % 3).to(z)).mean(), {"coef": 1e-4}, "zero_gradient_z"),
    ],
)
def test_an_expected_z_that_is_missing_or_doubled_has_one_error(loss: Any, expect: dict[str, Any], id: str) -> None:
    assert {one.id for one in audit_loss(loss, expect=expect).errors} - {"forward_backward_mismatch"} == {id}


def test_expected_denominators_alone_are_another_check() -> None:
    assert differs(plain, expect={"denominator": "valid"}).verdict == "not_applicable"
    found = audit_loss(plain, expect={"z_denominator": "all"}).found
    assert [one.id for one in found] == ["denominator_mismatch"]


def test_the_table_of_the_command_spoke_python(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "capped.py").write_text(
        "import torch, torch.nn.functional as F\n\n\n"
        "def loss(z, y):\n    z = 30 * torch.tanh(z / 30)\n"
        "    return F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1)[y != -100].square().mean()\n"
    )
    main(["audit-loss", f"{tmp_path}/capped.py:loss", "--verbose", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "--softcap" in printed
    assert "--logit-scale" in printed
    assert not re.search(r"`(expect|per_token|valid_vocab|softcap|logit_scale|linear|off)=", printed)
    written = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    sentences = " ".join(one["sentence"] for one in written["findings"])
    assert "`softcap=`" in sentences
    assert "--" not in sentences


def test_a_clean_loss_printed_a_screen_of_passes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit-loss", f"{script}:right", "--coef", "1e-4"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 12
    assert re.search(r"\d+ passed(, \d+ not applicable)?; --verbose prints them\.", short)
    assert main([*words, "--verbose"]) == 0
    whole = capsys.readouterr().out
    assert all(one in whole for one in ("zero_gradient_z", "padding_in_log_z", "not_repeatable"))
    assert "--verbose" not in whole
    assert main(["audit-loss", f"{script}:plain", "--coef", "1e-4"]) == 1
    found = capsys.readouterr().out
    assert "✗ error" in found
    assert "✓ pass" not in found
