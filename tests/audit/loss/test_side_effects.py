"""What a loss does to the process, and functions that are not losses of (logits, target), leave the command in order."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from zloss.audit.loss.audit import audit_loss
from zloss.cli.main import main
from zloss.errors import InputError

LOSS = """
import torch.nn.functional as F

def plain(z, y):
    n = (y != -100).sum().clamp(min=1)
    return F.cross_entropy(z, y, reduction="sum") / n + 1e-3 * z.logsumexp(-1)[y != -100].square().sum() / n
"""

CHANGES_FOLDER = f"""
import os, tempfile
os.chdir(tempfile.gettempdir())
{LOSS}
def loss(z, y):
    os.chdir("/")
    return plain(z, y)
"""

REPLACES_STREAMS = f"""
import io, sys
sys.stdout = None
{LOSS}
def loss(z, y):
    sys.stdout = io.StringIO()
    sys.stderr = None
    return plain(z, y)
"""


def test_a_loss_that_changes_the_folder_does_not_move_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report was written below the folder that the loss had changed to."""
    (tmp_path / "losses.py").write_text(CHANGES_FOLDER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["audit-loss", "losses.py:loss", "--out", "result"]) == 0
    assert os.getcwd() == str(tmp_path)
    assert json.loads((tmp_path / "result/report.json").read_text(encoding="utf-8"))["identified"]["has_z"] is True
    assert "result/report.json" in capsys.readouterr().out


def test_a_loss_that_replaces_stdout_does_not_silence_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "losses.py").write_text(REPLACES_STREAMS, encoding="utf-8")
    streams = sys.stdout, sys.stderr
    assert main(["audit-loss", f"{tmp_path}/losses.py:loss"]) == 0
    assert (sys.stdout, sys.stderr) == streams
    assert "No finding: the gradient of this loss matches its value." in capsys.readouterr().out


def test_a_file_can_import_its_neighbors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "training"
    folder.mkdir()
    (folder / "neighbor_of_the_loss.py").write_text(LOSS, encoding="utf-8")
    (folder / "losses.py").write_text("from neighbor_of_the_loss import plain\n", encoding="utf-8")
    assert main(["audit-loss", f"{folder}/losses.py:plain"]) == 0
    assert "No finding: the gradient of this loss matches its value." in capsys.readouterr().out


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """As in Megatron's moe_utils."""
    return torch.mean(torch.square(torch.logsumexp(logits, dim=-1))) * z_loss_coeff


def test_a_router_loss_was_told_to_pass_its_per_token_variant() -> None:
    """Its coefficient was taken for targets."""
    with pytest.raises(InputError, match=r"takes \(logits, z_loss_coeff\) and no targets.*audit_router") as caught:
        audit_loss(z_loss_func)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_router_loss_with_its_coefficient_bound_was_accused_of_a_leak() -> None:
    audit = audit_loss(lambda logits, target: z_loss_func(logits, 1e-3))
    assert audit.errors == ()
    verdicts = {finding.id: finding for finding in audit.findings}
    assert verdicts["ignored_tokens_leak"].verdict == "not_applicable"
    assert "audit_router" in verdicts["unexplained_source"].sentence
    assert audit.identified.coef == pytest.approx(1e-3, rel=1e-9)


def test_the_callers_random_states_are_left_alone() -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    def loss(z: Tensor, y: Tensor) -> Tensor:
        chance = random.random() * numpy.random.rand()  # noqa: NPY002
        return torch.nn.functional.cross_entropy(torch.nn.functional.dropout(z, 0.1), y) * (1 + 0 * chance)

    before = states()
    audit_loss(loss)
    assert states() == before
