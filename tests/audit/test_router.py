"""The router section of an audit, on real model classes with random weights; and the projection audit: exact ratios."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.router.router_models import SOFTMAX, D, E, K, L, batch, deepseek_v3, phimoe, seeded, switch
from zloss.audit.router import (
    NO_OWN_LOSS_REASON,
    PAPER_CONVENTIONS,
    SIGMOID_REASON,
    UNKNOWN_REASON,
    audit_router,
    measure_model_router_scale,
    router_projection,
    seeded_router,
)
from zloss.errors import InputError, ShapeError
from zloss.models.routers import find_routers


@pytest.fixture(scope="module", params=list(SOFTMAX))
def family(request: pytest.FixtureRequest) -> Any:
    return seeded(SOFTMAX[request.param]).eval()


def test_captured_logits_are_those_the_model_outputs(family: Any) -> None:
    routers = find_routers(family)
    inputs = batch()
    with routers.capture() as layers:
        outputs = family(**inputs, output_router_logits=True)
    assert len(layers) == L == len(outputs.router_logits)
    for mine, theirs in zip(layers, outputs.router_logits, strict=True):
        assert torch.equal(mine, theirs.reshape(-1, E))
    assert (routers.top_k, routers.model_layers, routers.encoder_layers, routers.scoring) == (K, L, None, "softmax")
    assert list(routers.modules[0].weight(E).shape) == [E, D]
    assert not family._forward_hooks


def test_findings_against_their_definitions(family: Any) -> None:
    batches = [batch(padded=True), batch(rows=2, padded=False)]
    found = audit_router(family, batches, coef=1e-2)
    routers, log_z, entropy, norms = find_routers(family), [], [], []
    load = torch.zeros(L, E, dtype=torch.float64)
    for inputs in batches:
        keep = inputs["attention_mask"].reshape(-1).bool()
        with torch.no_grad(), routers.capture() as layers:
            family(**inputs)
        per_batch = []
        for index, layer in enumerate(layers):
            r = layer[keep].double()
            z, p = torch.logsumexp(r, dim=1), r.softmax(dim=1)
            log_z.append(z)
            entropy.append(-(p * p.log()).sum(dim=1))
            pulled = (p @ routers.modules[index].weight(E).double()).norm(dim=1)
            per_batch.append(2e-2 * (z - math.log(E)).abs() / (L * int(keep.sum())) * pulled)
            load[index] += torch.bincount(r.topk(K, dim=1).indices.reshape(-1), minlength=E)
        norms.append(torch.cat(per_batch).mean())
    z = torch.cat(log_z)
    assert found.decisions == z.numel()
    assert found.log_z.p999 == pytest.approx(float(z.quantile(0.999)), rel=1e-5)
    assert found.log_z.mean == pytest.approx(float(z.mean()), rel=1e-5)
    assert found.violation.p99 == pytest.approx(float((z - math.log(E)).abs().quantile(0.99)), rel=1e-4)
    assert found.entropy == pytest.approx(float(torch.cat(entropy).mean()), rel=1e-5)
    cv = (load.std(dim=1, correction=0) / load.mean(dim=1)).mean()
    assert found.load_cv == pytest.approx(float(cv), rel=1e-6)
    assert found.correction_norm == pytest.approx(float((sum(norms) / 2).detach()), rel=1e-4)
    kept = int(batches[0]["attention_mask"].sum())
    assert found.absolute == pytest.approx(1e-2 / (L * kept), rel=1e-12)
    assert (found.relative, found.layers, found.top_k, found.experts) == (1.0, L, K, E)
    assert [layer.name for layer in found.per_layer] == [router.name for router in routers.modules]
    assert found.applied is None
    assert found.reasons == (NO_OWN_LOSS_REASON,)


def test_convention_of_the_findings_uses_the_model_s_k_and_depth() -> None:
    model = seeded(SOFTMAX["olmoe"]).eval()
    assert audit_router(model, [batch()], convention="megatron").relative == L
    assert audit_router(model, [batch()], convention="olmoe").relative == 1 / K


@pytest.mark.parametrize("padded", [False, True])
def test_switch_applies_two_token_layer_means_and_counts_padding(padded: bool) -> None:
    model = seeded(switch).double().eval()
    for router in find_routers(model).modules:
        router.module.dtype = torch.float64  # the router otherwise rounds itself to fp32
    inputs = batch(padded=padded)
    found = measure_model_router_scale(model, inputs, coef=1.0)
    assert found.relative == pytest.approx(2.0, rel=1e-3)
    assert found.target == pytest.approx(0.0, abs=1e-3)
    assert found.residual < 1e-3
    known = measure_model_router_scale(model, inputs, target=0.0, seed=1)
    assert (known.target, known.relative) == (0.0, pytest.approx(2.0, rel=1e-3))
    before = model.router_z_loss_coef
    masked = measure_model_router_scale(
        model, inputs, mask=[inputs["attention_mask"].reshape(-1).bool()] * 2 + [torch.ones(30)] * 2
    )
    assert model.router_z_loss_coef == before
    if padded:
        assert masked.padding_ratio == pytest.approx(1.0, rel=1e-3)


def test_audit_of_switch_reports_what_its_own_loss_applies() -> None:
    found = audit_router(seeded(switch).eval(), [batch()])
    assert (found.layers, found.top_k, found.model_layers) == (4, 1, 8)
    assert found.applied.relative == pytest.approx(2.0, rel=1e-3)
    assert found.applied.coef == pytest.approx(0.001)
    assert audit_router(seeded(switch).eval(), [batch()], convention="hf_switch").relative == 2.0


def test_sigmoid_routers_are_labelled_as_having_no_softmax_normalizer() -> None:
    found = audit_router(seeded(deepseek_v3).eval(), [batch()])
    assert (found.scoring, found.softmax_normalizer) == ("sigmoid", False)
    assert (found.log_z, found.entropy, found.absolute, found.relative) == (None, None, None, None)
    assert SIGMOID_REASON in found.reasons


def test_a_router_that_does_not_tell_is_measured_but_not_vouched_for() -> None:
    found = audit_router(seeded(phimoe).eval(), [batch()])
    assert (found.scoring, found.softmax_normalizer) == ("unknown", None)
    assert UNKNOWN_REASON in found.reasons
    assert found.log_z is not None
    assert found.relative == 1.0


def test_bad_input() -> None:
    with pytest.raises(InputError, match="records no router logits"):
        audit_router(torch.nn.Linear(2, 2), [])
    model = seeded(SOFTMAX["olmoe"])
    with pytest.raises(InputError, match="`batches` is empty"):
        audit_router(model, [])
    with pytest.raises(InputError, match="at most the number of experts"):
        audit_router(model, [batch()], top_k=E + 1)
    with pytest.raises(InputError, match=r"\[batch, sequence\] mask"):
        audit_router(model, [{**batch(), "attention_mask": torch.ones(3, 1, 10, 10)}])
    with pytest.raises(InputError, match="has no attribute 'router_z_loss_coef'"):
        measure_model_router_scale(model, batch())


def test_the_coefficient_is_the_model_s_own_or_called_hypothetical() -> None:
    """The report used to show a default λ_R of 1e-3 as if it were the model's."""
    model = seeded(SOFTMAX["olmoe"]).eval()
    bare = audit_router(model, [batch()])
    assert (bare.coef, bare.coef_origin, bare.coef_key) == (1e-3, "hypothetical", None)
    assert bare.projection.startswith("hypothetical, at coefficient 0.001")
    model.config.moe_zloss_weight = 0.05
    own = audit_router(model, [batch()])
    assert (own.coef, own.coef_origin, own.coef_key) == (0.05, "configuration", "moe_zloss_weight")
    assert own.correction_norm == pytest.approx(50 * (bare.correction_norm or 0), rel=1e-6)
    given = audit_router(model, [batch()], coef=1e-2)
    assert (given.coef, given.coef_origin) == (1e-2, "given")
    model.config.moe_zloss_weight = 0
    off = audit_router(model, [batch()])
    assert off.coef_origin == "hypothetical"
    assert any("moe_zloss_weight = 0" in reason for reason in off.reasons)


# The projection audit of the paper (tab:router).


def hidden(tokens: int = 64, width: int = 32, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Heavy-tailed rows, as a language model's hidden states have.
    h = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (h * h.abs().exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_stand_in_exact_ratios(dtype: torch.dtype) -> None:
    lines = router_projection(hidden(dtype=dtype))
    assert [(line.top_k, line.convention) for line in lines] == [(k, c) for k in (1, 2, 4) for c in PAPER_CONVENTIONS]
    for start, k in ((0, 1), (3, 2), (6, 4)):
        mean, active_mean, active_sum = lines[start : start + 3]
        assert [mean.relative, active_mean.relative, active_sum.relative] == [1.0, 1 / k, float(k)]
        assert active_mean.correction_norm == mean.correction_norm / k
        assert active_sum.correction_norm == mean.correction_norm * k


def test_norm_against_its_definition() -> None:
    h = hidden(dtype=torch.float64)
    line = next(
        line for line in router_projection(h, seed=11) if (line.top_k, line.convention) == (2, "active_route_sum")
    )
    w = seeded_router(16, 32, seed=13, init_std=0.02, dtype=torch.float64)
    r = (h @ w.T).requires_grad_()
    # α included: two replicas of every violation, then the mean over decisions
    loss = 1e-3 * (torch.logsumexp(r, dim=1) - math.log(16)).square().repeat(2).sum() / h.shape[0]
    (grad,) = torch.autograd.grad(loss, r)
    assert line.correction_norm == pytest.approx(float((grad @ w).norm(dim=1).mean()), rel=1e-12)


def test_the_router_differs_per_k_and_with_the_seed() -> None:
    first = {
        line.top_k: line.correction_norm
        for line in router_projection(hidden())
        if line.convention == "token_layer_mean"
    }
    assert len(set(first.values())) == 3
    other = router_projection(hidden(), seed=100)
    assert other[0].correction_norm != first[1]


def test_hidden_states_of_a_batch_must_be_flattened() -> None:
    with pytest.raises(ShapeError, match="flatten"):
        router_projection(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("kind", ["one batch", "tensor", "none", "list of tensors"])
def test_batches_of_a_foreign_type_end_in_a_raw_exception(kind: str) -> None:
    inputs = batch()
    given, sentence = {
        "one batch": (inputs, r"a list of batches .* but got one batch: pass `\[batch\]`"),
        "tensor": (inputs["input_ids"], "but got Tensor"),
        "none": (None, "but got NoneType"),
        "list of tensors": ([inputs["input_ids"]], r"`batches\[0\]` is expected to be .* but got Tensor"),
    }[kind]
    with pytest.raises(InputError, match=sentence):
        audit_router(seeded(SOFTMAX["olmoe"]), given)  # type: ignore[arg-type]
