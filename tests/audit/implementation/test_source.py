"""The source audit against a straight fp64 definition, and the identity that splits its error."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import zloss
from zloss.audit.implementation.source import fp64_head, source_audit, source_errors
from zloss.errors import UnknownNameError
from zloss.models.output_head import OutputHead

COEF = 3e-4
V, D, T = 211, 16, 23


def logits(seed: int = 0, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(T, V, generator=generator, dtype=torch.float64) + 12


def straight(z: Tensor, stored: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """Δ_src per token and cosine, by autograd of the penalty in fp64 on both logits."""
    out = []
    for values in (z, stored.double()):
        leaf = values.clone().requires_grad_()
        (COEF * (torch.logsumexp(leaf, -1) - c) ** 2).sum().backward()
        out.append(leaf.grad)
    want, got = out
    return (got - want).norm(dim=-1) / want.norm(dim=-1), torch.cosine_similarity(got, want, dim=-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_delta_and_cosine_are_those_of_the_definition(dtype: torch.dtype) -> None:
    z, c = logits(), math.log(V)
    errors = source_errors(z, z.to(dtype), COEF, c)
    delta, cosine = straight(z, z.to(dtype), c)
    torch.testing.assert_close(errors.source.delta, delta, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(errors.source.cosine, cosine, rtol=0, atol=1e-6)
    # The oracle sees a wrong reference: without c, or of another temperature.
    wrong, _ = straight(z, z.to(dtype), c + 8)
    assert not torch.allclose(errors.source.delta, wrong, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("statistics", ["fp32", "storage"])
def test_the_three_terms_add_up_to_the_measured_error(dtype: torch.dtype, statistics: str) -> None:
    z = logits(1)
    errors = source_errors(z, z.to(dtype), COEF, 2.0, statistics=statistics)
    assert float((errors.residual_C / errors.source.want).max()) <= 1e-6
    if dtype != torch.float32:
        # Each term is needed: the other two leave something over.
        assert float(errors.terms["epsilon_z"].min()) > 0
        largest = errors.terms["epsilon_p"] / errors.source.want
        assert float(largest.mean()) > 1e-4


def test_the_residual_sees_an_error_that_is_not_in_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(logits: Tensor, coef: float, target: float, reduction: str = "mean") -> Tensor:
        return 1.001 * zloss.z_loss_source(logits, coef, target, reduction)

    monkeypatch.setattr("zloss.audit.implementation.source.z_loss_source", doubled)
    z = logits(2)
    errors = source_errors(z, z.bfloat16(), COEF, 2.0)
    assert float((errors.residual_C / errors.source.want).min()) > 9e-4


def test_statistics_rounded_to_the_storage_lose_what_the_logits_kept() -> None:
    z = logits(3).bfloat16().double()
    kept = source_errors(z, z.bfloat16(), COEF, 2.0)
    rounded = source_errors(z, z.bfloat16(), COEF, 2.0, statistics="storage")
    assert float(kept.source.delta.max()) < 1e-6
    assert float(rounded.source.delta.mean()) > 1e-3


def head(*, bias: bool = False, **options: float) -> OutputHead:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(V, D, generator=generator)
    bias_V = torch.randn(V, generator=generator) if bias else None
    return OutputHead(torch.nn.Identity(), weight, bias_V, False, **options)


@pytest.mark.parametrize("options", [{}, {"logit_scale": 0.25}, {"softcap": 3.0}])
def test_reference_logits_are_the_models_in_fp64(options: dict[str, float]) -> None:
    model_head = head(bias=True, **options)
    hidden = torch.randn(T, D, generator=torch.Generator().manual_seed(6))
    got = 4 * fp64_head(model_head).logits(hidden.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, 4 * model_head.logits(hidden).double(), rtol=1e-5, atol=1e-5)


def test_rows_of_an_audit_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(T, D, generator=torch.Generator().manual_seed(7))
    whole = source_audit(head(), hidden, block_size=8, target=math.log(V))
    monkeypatch.setattr("zloss.audit.implementation.source.CHUNK_VALUES", 3 * V)
    split = source_audit(head(), hidden, block_size=8, target=math.log(V))
    assert len(whole) == 9
    for a, b in zip(whole, split, strict=True):
        assert (a.storage, a.logit_scale, a.tokens) == (b.storage, b.logit_scale, T)
        assert a.delta_src.mean == pytest.approx(b.delta_src.mean, rel=1e-9)
        assert a.delta_src.p99 == pytest.approx(b.delta_src.p99, rel=1e-9)
        assert a.forward_scalar == pytest.approx(b.forward_scalar, rel=1e-6)
        assert a.residual <= 1e-6


def test_storage_order_and_forward_scalar() -> None:
    hidden = torch.randn(T, D, generator=torch.Generator().manual_seed(8))
    rows = {(r.storage, r.logit_scale): r for r in source_audit(head(), hidden, block_size=T, target=math.log(V))}
    bf16, fp16, fp32 = (rows[name, 1].delta_src.mean for name in ("bf16", "fp16", "fp32"))
    assert None not in (bf16, fp16, fp32)
    assert bf16 > 4 * fp16 > 400 * fp32
    z, c = fp64_head(head()).logits(hidden.double()), math.log(V)
    want = ((torch.logsumexp(z, -1) - c) ** 2).sum()
    got = ((torch.logsumexp(z.bfloat16().double(), -1) - c) ** 2).sum()
    assert rows["bf16", 1].forward_scalar == pytest.approx(float(abs(got - want) / want), rel=1e-3)


def test_an_unknown_storage_is_named() -> None:
    with pytest.raises(UnknownNameError, match="storage"):
        source_audit(head(), torch.zeros(2, D), block_size=2, storages=("fp8",), target=0.0)
