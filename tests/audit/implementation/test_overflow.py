"""The overflow audit against straight backward passes, and gradients that are not finite."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import zloss
from tests.audit.implementation.models import Case, tiny_case
from zloss.audit.implementation.overflow import gradient_norms, overflow_audit
from zloss.measure.bf16_products import native_bf16_products_work
from zloss.objectives import Objective
from zloss.results.options import HeadKind

OBJECTIVES: dict[str, Objective] = {
    "CE baseline": zloss.CrossEntropy(),
    "Centered head": zloss.CenteredHead(),
    "Standard Z-loss": zloss.StandardZLoss(3e-3),
    "Factorized Z-loss": zloss.FactorizedZLoss(3e-3, 3e-3),
    "Gain-aware Z-loss": zloss.GainAwareZLoss(3e-3, beta=1e-2),
    "Centered Z-loss": zloss.CenteredZLoss(3e-3),
}


def straight(case: Case, objective: Objective, block: int) -> tuple[float, float]:
    """Norms of the fp32 gradient of one block by the definition of the objective on the model's own logits."""
    model = case.checkpoint.model.requires_grad_()
    model.zero_grad()
    ids, label = case.blocks.inputs(block, block + 1), case.blocks.targets(block, block + 1).flatten()
    z = case.blocks.counted(model(input_ids=ids, use_cache=False).logits).flatten(0, 1)
    w = case.head.weight_VD.detach() * case.head.logit_scale
    p = torch.softmax(z.detach(), -1)
    gain = (p @ w).norm(dim=-1) / p.norm(dim=-1)
    loss = torch.nn.functional.cross_entropy(z, label)
    if objective.active:
        loss = loss + objective.penalty(z, gain).mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten().double() for grad in grads])
    return float(flat.norm()), float(flat.abs().max())


@pytest.mark.parametrize("kind", ["paper", "fused"])
@pytest.mark.parametrize("model", ["gpt2", "cohere"])
def test_norms_and_margin_are_those_of_the_definition(model: str, kind: HeadKind, tmp_path: Path) -> None:
    case = tiny_case(model, tmp_path, blocks=3)
    rows = overflow_audit(case.checkpoint, case.head, case.blocks, OBJECTIVES, autocast=None, kind=kind)
    assert [row.method for row in rows] == list(OBJECTIVES)
    for row in rows:
        norms = [straight(case, OBJECTIVES[row.method], block) for block in range(3)]
        assert row.grad_norm_mean == pytest.approx(sum(two for two, _ in norms) / 3, rel=1e-4)
        assert row.grad_inf_mean == pytest.approx(sum(inf for _, inf in norms) / 3, rel=1e-4)
        assert row.margin is not None
        assert row.margin.kappa_max == pytest.approx([65504 / inf for _, inf in norms], rel=1e-4)
    by = {row.method: row for row in rows}
    if kind == "fused":
        assert by["CE baseline"].margin == by["Centered head"].margin
    # The oracle tells methods apart.
    assert by["Standard Z-loss"].grad_norm_mean != pytest.approx(by["Centered Z-loss"].grad_norm_mean, rel=1e-3)


def test_bf16_autocast_stays_near_fp32(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path)
    chosen = {name: OBJECTIVES[name] for name in ("CE baseline", "Standard Z-loss")}
    full = overflow_audit(case.checkpoint, case.head, case.blocks, chosen, autocast=None)
    half = overflow_audit(case.checkpoint, case.head, case.blocks, chosen)
    for a, b in zip(full, half, strict=True):
        assert b.grad_norm_mean == pytest.approx(a.grad_norm_mean, rel=0.1)
        assert b.grad_norm_mean != a.grad_norm_mean


def bf16_norms(case: Case, coef: float) -> list[float]:
    """‖g‖ of every block as a stack under bf16 autocast computes it: the model's own bf16 logits, the loss of them in fp32."""
    model = case.checkpoint.model.requires_grad_()
    found = []
    for block in range(case.blocks.count):
        model.zero_grad()
        ids, label = case.blocks.inputs(block, block + 1), case.blocks.targets(block, block + 1).flatten()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = case.blocks.counted(model(input_ids=ids, use_cache=False).logits).flatten(0, 1)
        assert logits.dtype == torch.bfloat16
        z = logits.float()
        violation = torch.logsumexp(z, -1) - math.log(z.shape[-1])
        (torch.nn.functional.cross_entropy(z, label) + coef * violation.square().mean()).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(float(torch.cat([grad.flatten().double() for grad in grads]).norm()))
    return found


@pytest.mark.skipif(not native_bf16_products_work(), reason="bf16 products of oneDNN do not run here")
def test_logits_are_materialised_in_the_autocast_dtype_as_the_paper_does(tmp_path: Path) -> None:
    """fp32 logits from bf16 operands were audited, which no stack with materialised logits has."""
    case = tiny_case("gpt2", tmp_path)
    chosen = {"Standard Z-loss": zloss.StandardZLoss(3e-3)}
    expected = bf16_norms(case, 3e-3)
    (paper,), (fused,) = (
        overflow_audit(case.checkpoint, case.head, case.blocks, chosen, kind=kind) for kind in ("paper", "fused")
    )
    mean = sum(expected) / len(expected)
    assert paper.grad_norm_mean == pytest.approx(mean, rel=1e-4)
    assert fused.grad_norm_mean != pytest.approx(mean, rel=1e-4)


def test_a_nonfinite_gradient_is_an_overflow(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path)
    with torch.no_grad():
        case.head.weight_VD[3, 0] = math.inf
    (row,) = overflow_audit(case.checkpoint, case.head, case.blocks, {"ce": zloss.CrossEntropy()}, autocast=None)
    assert row.margin is not None
    assert row.margin.nonfinite == row.batches == 2
    assert row.margin.kappa_min == 0
    assert set(row.margin.psi.values()) == {1.0}
    assert row.grad_norm_mean is None


def test_nan_is_not_lost_behind_a_larger_number() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (a * 1e6).sum() + (b * torch.tensor([math.nan, 1.0])).sum()
    assert all(math.isnan(norm) for norm in gradient_norms(loss, [a, b]))
    assert all(math.isnan(norm) for norm in gradient_norms(loss, [b, a]))


def test_methods_that_a_capped_head_does_not_have_say_why(tmp_path: Path) -> None:
    case = tiny_case("gemma2", tmp_path, blocks=1)
    rows = {
        row.method: row for row in overflow_audit(case.checkpoint, case.head, case.blocks, OBJECTIVES, autocast=None)
    }
    assert rows["Standard Z-loss"].margin is not None
    assert rows["Centered Z-loss"].margin is None
    assert "softcap" in rows["Centered Z-loss"].reason
    assert rows["Centered head"].margin is None
