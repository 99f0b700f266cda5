"""Every trap is named by its id; right losses raise nothing beyond what is true of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zloss
from tests.audit.loss import faulty, zoo
from zloss.audit.loss.audit import audit_loss

CONTRACT = {
    "zero_gradient_z", "low_precision_source", "forward_backward_mismatch", "all_ignored_nonfinite", "denominator_mismatch",
    "max_shifted", "not_off", "counted_twice", "overwrites_input", "reported_z_dtype", "reported_z_no_gradient",
    "reported_z_value", "upstream_ignored", "probabilities_not_logits", "overflow", "filtered_source", "padding_in_log_z",
}  # fmt: skip


def found(loss: Any, **options: Any) -> set[str]:
    return {finding.id for finding in audit_loss(loss, **options).found}


def test_the_right_loss_of_the_same_family_has_no_finding() -> None:
    audit = audit_loss(faulty.correct, off=faulty.only_cross_entropy, per_token=faulty.per_token, expect=faulty.EXPECT)
    assert audit.found == ()
    verdicts = {finding.id: finding.verdict for finding in audit.findings}
    for answered in ("not_off", "counted_twice", "upstream_ignored", "differs_from_expected", "overflow"):
        assert verdicts[answered] == "pass"


def test_masked_padding_has_no_finding() -> None:
    assert found(faulty.padding_masked, valid_vocab=faulty.VALID_VOCAB) == set()


OBJECTIVES = {
    "ce": zloss.CrossEntropy(),
    "standard": zloss.StandardZLoss(1e-4),
    "standard, c = 0": zloss.StandardZLoss(1e-3, 0.0),
    "centered": zloss.CenteredZLoss(1e-3),
    "factorized": zloss.FactorizedZLoss(1e-3, 2e-3),
    "gain-aware": zloss.GainAwareZLoss(1e-3),
}


@pytest.mark.usefixtures("few_vocabularies")
@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_our_head_loss_has_no_finding(name: str, backend: str) -> None:
    def loss(objective: zloss.Objective, reduction: str = "mean") -> Any:
        return lambda h, w, y: zloss.head_loss(h, w, y, objective, reduction=reduction, backend=backend)

    audit = audit_loss(
        loss(OBJECTIVES[name]), off=loss(zloss.CrossEntropy()), per_token=loss(OBJECTIVES[name], "none"), linear=True
    )
    assert audit.found == ()
    assert audit.identified.has_z == (name != "ce")
    assert audit.identified.coordinate == {"ce": None, "standard": "raw", "standard, c = 0": "raw"}.get(
        name, "centered" if name == "centered" else "other"
    )
    extra = {"factorized": {"shift_coef": 1e-3, "shift_target": 0.0}, "gain-aware": {"beta": 1e-2}}.get(name, {})
    assert audit.identified.extra == pytest.approx(extra, abs=1e-9)


@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "gain-aware"])
def test_our_logits_loss_has_no_finding(name: str, backend: str) -> None:
    assert found(lambda z, y: zloss.logits_loss(z, y, OBJECTIVES[name], backend=backend)) == set()


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({"valid_vocab": 80}, {"valid_vocab": 80}),
        ({"label_smoothing": 0.1}, {}),
        ({"reduction": "sum"}, {}),
        ({"ignore_index": -1}, {"ignore_index": -1}),
    ],
)
def test_our_options_have_no_finding(ours: dict[str, Any], options: dict[str, Any]) -> None:
    assert found(lambda z, y: zloss.logits_loss(z, y, zloss.StandardZLoss(1e-3), **ours), **options) == set()


@pytest.mark.usefixtures("few_vocabularies")
@pytest.mark.parametrize("objective", ["ce", "standard"])
def test_softcap_and_logit_scale_are_recognized(objective: str) -> None:
    capped = audit_loss(lambda z, y: zloss.logits_loss(z, y, OBJECTIVES[objective], softcap=30.0))
    assert capped.found == ()
    assert capped.identified.extra == pytest.approx({"softcap": 30.0}, rel=1e-6)
    scaled = audit_loss(lambda h, w, y: zloss.head_loss(h, w, y, OBJECTIVES[objective], logit_scale=0.5), linear=True)
    assert scaled.found == ()
    assert scaled.identified.extra == pytest.approx({"logit_scale": 0.5}, rel=1e-6)


def manual_z(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1)[y != -100].square().mean()


def log_softmax_z(z: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    picked = torch.log_softmax(z, -1)[valid].gather(1, y[valid, None])
    return -picked.mean() + 1e-4 * z.logsumexp(-1)[valid].square().mean()


@pytest.mark.parametrize("loss", [manual_z, log_softmax_z, getattr(F, "linear_cross_entropy", None)])
def test_pytorch_losses_are_not_finite_on_ignored_batches_and_right_otherwise(loss: Any) -> None:
    if loss is None:
        pytest.skip("needs torch 2.13")
    linear = loss not in (manual_z, log_softmax_z)
    audit = audit_loss(loss, linear=linear)
    assert {finding.id for finding in audit.found} == {"all_ignored_nonfinite"}
    assert audit.identified.has_z is not linear


def test_a_z_that_reaches_hidden_but_not_weight_is_found() -> None:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return zoo.ce(h @ w.T, y) + zoo.zl(h @ w.detach().T, y)

    assert found(loss, linear=True) & {"forward_backward_mismatch", "zero_gradient_z"}


def test_the_result_is_the_contract() -> None:
    data = audit_loss(manual_z).to_dict()
    assert data["schema"] == "zloss.loss-audit/1"
    assert {"has_z", "coef", "target", "coordinate", "ce_denominator", "z_denominator", "uncertainty"} <= set(
        data["identified"]
    )
    assert {"forward_rel_error", "delta_src", "cosine"} <= set(data["source"])
    assert all(
        set(finding) == {"id", "verdict", "sentence", "figure", "severity", "witness"} for finding in data["findings"]
    )
    ids = [finding["id"] for finding in data["findings"]]
    assert set(ids) >= CONTRACT
    assert len(ids) == len(set(ids))
    assert math.isfinite(data["source"]["delta_src"])


def test_logits_stored_in_bf16_between_bf16_hidden_and_weight_are_reported() -> None:
    def stores(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return faulty.correct((h @ w.T).float(), y)

    def keeps(h: Tensor, w: Tensor, y: Tensor) -> Any:
        return zloss.head_loss(h, w, y, zloss.StandardZLoss(1e-3, 0.0))

    stored, kept = (audit_loss(loss, linear=True) for loss in (stores, keeps))
    assert stored.source.bf16_inputs is not None
    assert kept.source.bf16_inputs is not None
    assert kept.source.bf16_inputs < 3e-3 < 7e-3 < stored.source.bf16_inputs
    sentences = [f.sentence for f in stored.findings if f.id == "low_precision_source"]
    assert "stores bf16 logits" in sentences[0]
    assert stored.found == kept.found == ()
