"""Update and overflow audit against straight backward passes through the model's own logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zloss
from tests.audit.implementation.models import Case, tiny_case
from zloss.audit.implementation.gradients import gradient_norms, overflow_audit, update_audit
from zloss.audit.implementation.source import storage_dtype
from zloss.measure.bf16_products import native_bf16_products_work
from zloss.objectives import Objective
from zloss.results.implementation_audit import UpdateErrors
from zloss.results.options import HeadKind

COEF = 1e-2
KINDS = ["gpt2", "phi", "cohere", "gemma2"]
"""Tied; untied with bias; tied with scale; tied with cap."""
OBJECTIVES: dict[str, Objective] = {
    "CE baseline": zloss.CrossEntropy(),
    "Centered head": zloss.CenteredHead(),
    "Standard Z-loss": zloss.StandardZLoss(3e-3),
    "Factorized Z-loss": zloss.FactorizedZLoss(3e-3, 3e-3),
    "Gain-aware Z-loss": zloss.GainAwareZLoss(3e-3, beta=1e-2),
    "Centered Z-loss": zloss.CenteredZLoss(3e-3),
}


def flat_gradient(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


def straight_update(case: Case, line: UpdateErrors) -> tuple[float, float, float]:
    """(relative error, cosine, Adam relative error) from two whole backward passes over all blocks at once."""
    model = case.checkpoint.model.requires_grad_()
    logits = case.logits() * line.logit_scale
    stored = logits.detach().to(storage_dtype(line.storage))
    own = [case.head.weight_VD] if case.head.bias_V is None else [case.head.weight_VD, case.head.bias_V]
    flat = []
    for source_logits in (logits, stored):
        leaf = source_logits.detach().double().requires_grad_()
        loss = COEF * ((torch.logsumexp(leaf, -1) - math.log(case.head.vocab)) ** 2).mean()
        if line.part == "total":
            loss = loss + torch.nn.functional.cross_entropy(leaf, case.labels())
        (source,) = torch.autograd.grad(loss, leaf)
        model.zero_grad()
        logits.backward(source.to(logits.dtype), retain_graph=True)
        flat.append(flat_gradient(list(model.parameters()) if line.scope == "all" else own))
    want, got = flat
    adam_want, adam_got = (g / (g.abs() + 1e-8) for g in flat)
    return (
        float((got - want).norm() / want.norm()),
        float(torch.cosine_similarity(got, want, dim=0)),
        float((adam_got - adam_want).norm() / adam_want.norm()),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_update_line_is_that_of_straight_backward_passes(kind: str, tmp_path: Path) -> None:
    case = tiny_case(kind, tmp_path, bos=kind == "cohere")
    case.checkpoint.model.requires_grad_(False)
    lines = update_audit(case.checkpoint, case.head, case.blocks, coef=COEF, target=math.log(case.head.vocab))
    assert len({(line.storage, line.logit_scale, line.part, line.scope) for line in lines}) == 2 * 2 * 2 * 2
    assert all(p.grad is None and not p.requires_grad for p in case.checkpoint.model.parameters())
    for line in lines:
        error, cosine, adam = straight_update(case, line)
        assert line.grad_rel_error == pytest.approx(error, rel=2e-2), line
        assert line.grad_cosine == pytest.approx(cosine, abs=1e-5), line
        # Coordinates near zero change sign with rounding alone, so Adam's direction is known less exactly.
        assert line.adam_dir_rel_error == pytest.approx(adam, rel=0.1), line


def test_fp32_storage_reaches_nothing_and_bf16_more_than_fp16(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path)
    options = {"logit_scales": (1,), "coef": COEF, "target": math.log(case.head.vocab)}
    lines = update_audit(case.checkpoint, case.head, case.blocks, storages=("fp32", "bf16", "fp16"), **options)
    errors = {(line.storage, line.part, line.scope): line.grad_rel_error or 0.0 for line in lines}
    for part in ("total", "z"):
        for scope in ("head", "all"):
            assert errors["fp32", part, scope] < 1e-5
            assert 1e-5 < errors["fp16", part, scope] < errors["bf16", part, scope] / 4


def straight_norms(case: Case, objective: Objective, block: int) -> tuple[float, float]:
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
    flat = flat_gradient(list(model.parameters()))
    return float(flat.norm()), float(flat.abs().max())


@pytest.mark.parametrize("kind", ["paper", "fused"])
@pytest.mark.parametrize("model", ["gpt2", "cohere"])
def test_norms_and_margin_are_those_of_the_definition(model: str, kind: HeadKind, tmp_path: Path) -> None:
    case = tiny_case(model, tmp_path, blocks=3)
    rows = overflow_audit(case.checkpoint, case.head, case.blocks, OBJECTIVES, coef=3e-3, autocast=None, kind=kind)
    assert [(row.method, row.coef > 0) for row in rows] == [(name, each.active) for name, each in OBJECTIVES.items()]
    for row in rows:
        twos, infs = zip(*(straight_norms(case, OBJECTIVES[row.method], block) for block in range(3)), strict=True)
        assert row.grad_norm_mean == pytest.approx(sum(twos) / 3, rel=1e-4)
        assert row.grad_inf_mean == pytest.approx(sum(infs) / 3, rel=1e-4)
        assert row.kappa_min == pytest.approx(65504 / max(infs), rel=1e-4)
        assert row.psi == {f"psi_{4**n}": sum(4**n * inf > 65504 for inf in infs) / 3 for n in range(4, 9)}
    by = {row.method: row for row in rows}
    if kind == "fused":
        assert by["CE baseline"].kappa_min == by["Centered head"].kappa_min
    # The oracle tells methods apart.
    assert by["Standard Z-loss"].grad_norm_mean != pytest.approx(by["Centered Z-loss"].grad_norm_mean, rel=1e-3)


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
        found.append(float(flat_gradient(list(model.parameters())).norm()))
    return found


def test_logits_are_materialized_in_the_autocast_dtype_as_the_paper_does(tmp_path: Path) -> None:
    """The audit used to take fp32 logits from bf16 operands, which no stack with materialized logits has."""
    case = tiny_case("gpt2", tmp_path)
    chosen = {"Standard Z-loss": zloss.StandardZLoss(3e-3)}
    audited = (case.checkpoint, case.head, case.blocks, chosen)
    (full,) = overflow_audit(*audited, coef=3e-3, autocast=None)
    (paper,), (fused,) = (overflow_audit(*audited, coef=3e-3, kind=kind) for kind in ("paper", "fused"))
    assert paper.grad_norm_mean == pytest.approx(full.grad_norm_mean, rel=0.1)
    assert paper.grad_norm_mean != full.grad_norm_mean
    if native_bf16_products_work():
        expected = bf16_norms(case, 3e-3)
        mean = sum(expected) / len(expected)
        assert paper.grad_norm_mean == pytest.approx(mean, rel=1e-4)
        assert fused.grad_norm_mean != pytest.approx(mean, rel=1e-4)


def test_a_nonfinite_gradient_is_an_overflow(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path)
    with torch.no_grad():
        case.head.weight_VD[3, 0] = math.inf
    objectives = {"ce": zloss.CrossEntropy()}
    (row,) = overflow_audit(case.checkpoint, case.head, case.blocks, objectives, coef=0.0, autocast=None)
    assert row.nonfinite == row.batches == 2
    assert row.kappa_min == 0
    assert set(row.psi.values()) == {1.0}
    assert row.grad_norm_mean is None


def test_nan_is_not_lost_behind_a_larger_number() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (a * 1e6).sum() + (b * torch.tensor([math.nan, 1.0])).sum()
    for parameters in ([a, b], [b, a]):
        assert all(math.isnan(norm) for norm in gradient_norms(loss, parameters))


def test_methods_that_a_capped_head_does_not_have_say_why(tmp_path: Path) -> None:
    case = tiny_case("gemma2", tmp_path, blocks=1)
    found = overflow_audit(case.checkpoint, case.head, case.blocks, OBJECTIVES, coef=3e-3, autocast=None)
    rows = {row.method: row for row in found}
    assert rows["Standard Z-loss"].kappa_min is not None
    assert rows["Centered Z-loss"].kappa_min is rows["Centered head"].kappa_min is None
    assert "softcap" in rows["Centered Z-loss"].reason
