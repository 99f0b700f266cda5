"""The losses of zloss and of PyTorch have no finding, and their numbers are read; kernels of others have what is true of them."""

from __future__ import annotations

import importlib.util
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

import zloss
from tests.audit.loss import faulty, zoo
from zloss.audit.loss.audit import audit_loss
from zloss.results.loss_audit import LossAudit


def found(audit: LossAudit) -> set[str]:
    return {finding.id for finding in audit.found}


def test_the_right_loss_of_the_traps_has_no_finding() -> None:
    audit = audit_loss(faulty.correct, off=faulty.only_cross_entropy, per_token=faulty.per_token, expect=faulty.EXPECT)
    assert audit.found == ()
    verdicts = {finding.id: finding.verdict for finding in audit.findings}
    for answered in ("not_off", "counted_twice", "upstream_ignored", "differs_from_expected", "overflow"):
        assert verdicts[answered] == "pass"


OBJECTIVES = {
    "ce": zloss.CrossEntropy(),
    "standard": zloss.StandardZLoss(1e-4),
    "standard, c = 0": zloss.StandardZLoss(1e-3, 0.0),
    "centered": zloss.CenteredZLoss(1e-3),
    "factorized": zloss.FactorizedZLoss(1e-3, 2e-3),
    "gain-aware": zloss.GainAwareZLoss(1e-3),
}
BACKENDS = {
    "ce": "dense",
    "standard": "chunked",
    "standard, c = 0": "dense",
    "centered": "chunked",
    "factorized": "chunked",
}


@pytest.mark.usefixtures("no_sixteen_bits")
@pytest.mark.parametrize("name", ["ce", "standard", "factorized", "gain-aware"])
def test_our_head_loss_has_no_finding(name: str) -> None:
    def loss(objective: zloss.Objective, reduction: str = "mean") -> Any:
        backend = BACKENDS.get(name, "chunked")
        return lambda h, w, y: zloss.head_loss(h, w, y, objective, reduction=reduction, backend=backend)

    plain, rows = loss(OBJECTIVES[name]), loss(OBJECTIVES[name], "none")
    audit = audit_loss(plain, off=loss(zloss.CrossEntropy()), per_token=rows, linear=True)
    assert audit.found == ()
    assert audit.identified.has_z == (name != "ce")
    coordinates = {"ce": None, "standard": "raw", "standard, c = 0": "raw", "centered": "centered"}
    assert audit.identified.coordinate == coordinates.get(name, "other")
    extra = {"factorized": {"shift_coef": 1e-3, "shift_target": 0.0}, "gain-aware": {"beta": 1e-2}}.get(name, {})
    assert audit.identified.extra == pytest.approx(extra, abs=1e-8)


@pytest.mark.parametrize("name", ["standard, c = 0", "centered", "factorized"])
def test_our_logits_loss_has_no_finding(name: str) -> None:
    backend = "dense" if BACKENDS[name] == "chunked" else "chunked"
    assert found(audit_loss(lambda z, y: zloss.logits_loss(z, y, OBJECTIVES[name], backend=backend))) == set()


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({"valid_vocab": 80}, {"valid_vocab": 80}),
        ({"label_smoothing": 0.1}, {}),
        ({"softcap": 30.0}, {"softcap": 30.0}),
    ],
)
def test_our_options_have_no_finding(ours: dict[str, Any], options: dict[str, Any]) -> None:
    audit = audit_loss(lambda z, y: zloss.logits_loss(z, y, zloss.StandardZLoss(1e-3), **ours), **options)
    assert found(audit) == set()
    assert audit.identified.coef == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.usefixtures("no_sixteen_bits")
def test_a_stated_logit_scale_of_our_head_has_no_finding() -> None:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Any:
        return zloss.head_loss(h, w, y, OBJECTIVES["standard"], logit_scale=0.5)

    audit = audit_loss(loss, linear=True, logit_scale=0.5)
    assert audit.found == ()
    assert audit.identified.coef == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.usefixtures("bf16_only")
def test_torch_s_linear_cross_entropy_has_no_error_with_16_bit_inputs() -> None:
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("needs torch 2.13")
    audit = audit_loss(F.linear_cross_entropy, linear=True)
    assert found(audit) <= {"all_ignored_nonfinite", "low_precision_source"}
    assert audit.errors == ()
    assert audit.identified.has_z is False


@pytest.mark.usefixtures("no_sixteen_bits")
def test_a_z_that_reaches_hidden_but_not_weight_is_found() -> None:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return zoo.ce(h @ w.T, y) + zoo.zl(h @ w.detach().T, y)

    assert found(audit_loss(loss, linear=True)) & {"forward_backward_mismatch", "zero_gradient_z"}


@pytest.mark.usefixtures("bf16_only")
def test_logits_stored_in_bf16_between_bf16_hidden_and_weight_are_a_note_with_a_figure() -> None:
    def stores(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return faulty.correct((h @ w.T).float(), y)

    def keeps(h: Tensor, w: Tensor, y: Tensor) -> Any:
        return zloss.head_loss(h, w, y, zloss.StandardZLoss(1e-3, 0.0))

    stored, kept = (audit_loss(loss, linear=True) for loss in (stores, keeps))
    assert [(one.id, one.severity) for one in stored.found] == [("low_precision_source", "note")]
    assert "stores 16-bit logits" in stored.found[0].sentence
    assert 5e-3 < (stored.found[0].figure or 0.0) < 5e-2
    assert kept.found == ()


def test_probe_heads_are_not_square_and_their_width_does_not_follow_the_tokens() -> None:
    shapes: set[tuple[int, int, int]] = set()

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        assert h.dtype not in (torch.bfloat16, torch.float16), "not here"
        shapes.add((h.shape[:-1].numel(), h.shape[-1], len(w)))
        norms = h.detach().double().norm(dim=-1)
        assert float(norms.max()) > 1.5 * float(norms.min())
        return zoo.plain(h @ w.T, y)

    assert audit_loss(loss, linear=True).found == ()
    assert all(len({t, d, v}) == 3 for t, d, v in shapes)
    assert len({d for t, d, v in shapes}) >= 2
    assert len({t for t, d, v in shapes if d == 80}) >= 3


# Triton losses, interpreted on the CPU.

TRUE_OF = {
    # It writes the gradient over the caller's logits, and the Z it returns has a `grad_fn` whose gradient is zero.
    "liger": {"overwrites_input", "reported_z_no_gradient"},
    "ours": set(),
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """The audits of those that are installed, from one process with the interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    names = [name for name in TRUE_OF if name != "liger" or importlib.util.find_spec("liger_kernel") is not None]
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / "src"), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [sys.executable, Path(__file__).with_name("interpreted_case.py"), *names]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(names, map(json.loads, done.stdout.strip().splitlines()[-len(names) :]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", TRUE_OF)
def test_an_interpreted_kernel_has_the_findings_that_are_true_of_it(case: str, interpreted: dict[str, Any]) -> None:
    if case not in interpreted:
        pytest.skip("liger-kernel is not installed")
    data = interpreted[case]
    assert {finding["id"] for finding in data["findings"] if finding["verdict"] == "finding"} == TRUE_OF[case]
    got = data["identified"]
    assert got["coef"] == pytest.approx(1e-3, rel=1e-3)
    assert got["target"] == pytest.approx(0.0, abs=1e-3)
    assert (got["coordinate"], got["ce_denominator"], got["z_denominator"]) == ("raw", "valid", "valid")
