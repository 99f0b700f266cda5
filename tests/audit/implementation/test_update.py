"""The update audit against straight backward passes through the model's own logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.audit.implementation.models import Case, tiny_case
from zloss.audit.implementation.source import storage_dtype
from zloss.audit.implementation.update import UpdateLine, update_audit

COEF = 1e-2
KINDS = ["gpt2", "phi", "cohere", "gemma2"]
"""Tied; untied with bias; tied with scale; tied with cap."""


def straight_source(z: Tensor, label: Tensor, part: str, c: float) -> Tensor:
    """The mean-reduced source by fp64 autograd at the logits."""
    leaf = z.detach().double().requires_grad_()
    loss = COEF * ((torch.logsumexp(leaf, -1) - c) ** 2).mean()
    if part == "total":
        loss = loss + torch.nn.functional.cross_entropy(leaf, label)
    (grad,) = torch.autograd.grad(loss, leaf)
    return grad.to(z.dtype)


def straight_row(case: Case, row: UpdateLine) -> tuple[float, float, float]:
    """(relative error, cosine, Adam relative error) from two whole backward passes over all blocks at once."""
    model = case.checkpoint.model.requires_grad_()
    logits = case.logits() * row.logit_scale
    stored = logits.detach().to(storage_dtype(row.storage))
    flat = []
    for source_logits in (logits, stored.to(logits.dtype)):
        model.zero_grad()
        logits.backward(straight_source(source_logits, case.labels(), row.part, row.target), retain_graph=True)
        own = [case.head.weight_VD] if case.head.bias_V is None else [case.head.weight_VD, case.head.bias_V]
        chosen = list(model.parameters()) if row.scope == "all" else own
        flat.append(torch.cat([p.grad.flatten().double() for p in chosen if p.grad is not None]))
    want, got = flat
    adam_want, adam_got = (g / (g.abs() + 1e-8) for g in flat)
    return (
        float((got - want).norm() / want.norm()),
        float(torch.cosine_similarity(got, want, dim=0)),
        float((adam_got - adam_want).norm() / adam_want.norm()),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_that_of_straight_backward_passes(kind: str, tmp_path: Path) -> None:
    case = tiny_case(kind, tmp_path, bos=kind == "cohere")
    target = math.log(case.head.vocab)
    rows = update_audit(
        case.checkpoint,
        case.head,
        case.blocks,
        storages=("bf16", "fp16"),
        logit_scales=(1, 4),
        coef=COEF,
        target=target,
    )
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        error, cosine, adam = straight_row(case, row)
        assert row.grad_rel_error == pytest.approx(error, rel=2e-2), row
        assert row.grad_cosine == pytest.approx(cosine, abs=1e-5), row
        # Coordinates near zero change sign with rounding alone, so Adam's direction is known less exactly.
        assert row.adam_rel_error == pytest.approx(adam, rel=0.1), row


def test_fp32_storage_reaches_nothing_and_bf16_more_than_fp16(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path)
    rows = update_audit(
        case.checkpoint,
        case.head,
        case.blocks,
        storages=("fp32", "bf16", "fp16"),
        logit_scales=(1,),
        coef=COEF,
        target=math.log(case.head.vocab),
    )
    by = {(row.storage, row.part, row.scope): row for row in rows}
    for part in ("total", "z"):
        for scope in ("head", "all"):
            errors = {storage: by[storage, part, scope].grad_rel_error for storage in ("fp32", "fp16", "bf16")}
            assert errors["fp32"] < 1e-5
            assert 1e-5 < errors["fp16"] < errors["bf16"] / 4


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    case = tiny_case("gpt2", tmp_path, blocks=1, size=4)
    case.checkpoint.model.requires_grad_(False)
    update_audit(case.checkpoint, case.head, case.blocks, storages=("bf16",), logit_scales=(1,), target=0.0)
    assert all(p.grad is None and not p.requires_grad for p in case.checkpoint.model.parameters())
