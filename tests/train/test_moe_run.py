"""Training a mixture of experts: matched variants train alike, every number against a straight recomputation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.train.tiny_moe import COEF, SHAPE, VARIANTS, routed, run_variants, tiny_moe_config
from zloss.models.routers import find_routers
from zloss.results.run_config import TrainConfig
from zloss.results.steps import StepRecord
from zloss.train import moe as moe_module
from zloss.train.data import batch_of
from zloss.train.folder import read_steps
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import initial_checkpoint, prepare_start

TLM = "token_layer_mean"
E, K, L = SHAPE["experts"], SHAPE["top_k"], SHAPE["layers"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny_moe_config(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def runs(base: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_variants(base, tmp_path_factory.mktemp("moe-runs"))


def steps(runs: Path, variant: str) -> list[StepRecord]:
    coef = "0" if variant == "none" else f"{COEF:g}"
    return read_steps(runs / f"{variant.replace(':', '-')}-{coef}-s1")


def in_fp64(model: Any) -> Any:
    """Experts in plain products: torch's grouped ones have no fp64."""
    model.set_experts_implementation("eager")
    return model.double()


def largest_gap(a: list[StepRecord], b: list[StepRecord]) -> float:
    return max(abs(x.loss - y.loss) for x, y in zip(a, b, strict=True))


def test_matched_variants_train_like_the_token_layer_mean(runs: Path) -> None:
    want = steps(runs, TLM)
    assert len(want) == 10
    for variant in VARIANTS:
        gap = largest_gap(steps(runs, variant), want)
        if variant.endswith("matched"):
            # k is a power of two, so that even the gradients have the same bits.
            assert gap <= 1e-6
            assert [r.grad_norm for r in steps(runs, variant)] == [r.grad_norm for r in want]
        elif variant != TLM:
            assert gap > 1e-4


def test_a_step_against_a_straight_recomputation(base: TrainConfig, runs: Path) -> None:
    """Loss terms and routing of the first step from the model's own forward pass, in fp64, micro-batch by micro-batch."""
    variant = "active_route_sum"
    config = routed(base, variant)
    start = prepare_start(config)
    model: Any = in_fp64(initial_checkpoint(start, config).model)
    index = batch_of(start.data.train, 1, 1, 4)
    routers = find_routers(model)
    ce, balance, phi, entropy, log_z, norms = [], [], [], [], [], []
    load = torch.zeros(L, E)
    for part in index.view(2, 2):
        inputs, targets = start.data.train.batch(part)
        with torch.no_grad(), routers.capture() as layers:
            out = model(input_ids=inputs)
        ce.append(F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()).item())
        balance.append(out.aux_loss.item())
        for index_l, (layer, router) in enumerate(zip(layers, routers.modules, strict=True)):
            p = layer.softmax(dim=1)
            z = layer.exp().sum(dim=1).log()
            log_z += z.tolist()
            phi += ((z - math.log(E)) ** 2).tolist()
            entropy += (-(p * p.log()).sum(dim=1)).tolist()
            load[index_l] += torch.bincount(layer.topk(K, dim=1).indices.flatten(), minlength=E)
            delta = (COEF * K / (2 * 96)) * 2 * (z - math.log(E)).unsqueeze(1) * p  # N_tl = 2 layers · 96 tokens
            weight = router.weight(E)
            norms += (delta @ weight).norm(dim=1).tolist()
    record = steps(runs, variant)[0]
    found = record.telemetry
    close = lambda value: pytest.approx(value, rel=2e-5)  # noqa: E731
    assert record.cross_entropy == close(np.mean(ce))
    assert found["load_balance"] == close(np.mean(balance))
    assert found["load_balance_term"] == close(0.01 * np.mean(balance))
    assert found["router_z"] == close(COEF * K * np.mean(phi))
    assert record.loss == close(np.mean(ce) + 0.01 * np.mean(balance) + COEF * K * np.mean(phi))
    assert record.auxiliary == pytest.approx(record.loss - record.cross_entropy, abs=1e-6)
    assert found["s_rel"] == close(K)
    assert found["router_absolute"] == close(COEF * K / (2 * 96))
    assert found["entropy"] == close(np.mean(entropy))
    assert found["load_cv"] == close(np.mean([x.std(correction=0) / x.mean() for x in load]))
    assert found["router_log_z_p99"] == close(np.quantile(log_z, 0.99))
    assert found["router_log_z_p999"] == close(np.quantile(log_z, 0.999))
    assert found["router_log_z_max"] == close(max(log_z))
    assert found["router_correction_norm"] == close(np.mean(norms))
    assert found["dropped_routes"] == 0.0
    # Balancing is about k, not 1.
    assert 0.9 * K < np.mean(balance) < 1.3 * K


def test_without_a_router_loss_only_balancing_is_added(runs: Path) -> None:
    for record in steps(runs, "none"):
        assert (record.telemetry["router_z"], record.telemetry["s_rel"]) == (0.0, 0.0)
        assert record.auxiliary == pytest.approx(record.telemetry["load_balance_term"], abs=1e-6)


def test_metrics_against_the_saved_model(base: TrainConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = replace(routed(base, "active_route_mean", capacity_factor=1.1), bos="yes", steps=3)
    start = prepare_start(config)
    metrics = run_training(config, start, tmp_path, options=RunOptions(checkpoint_every=0, save_model=True)).to_dict()
    model: Any = in_fp64(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).eval()
    valid = start.data.valid
    routers = find_routers(model)
    inputs, targets = valid.inputs(0, valid.count), valid.targets(0, valid.count)
    with torch.no_grad(), routers.capture() as captured:
        logits = model(input_ids=inputs).logits[:, 1:]
    # The BOS is routed too, but its decision is not counted, as its prediction is not.
    layers = [layer.view(valid.count, -1, E)[:, 1:].flatten(0, 1) for layer in captured]
    p = torch.stack([layer.softmax(dim=1) for layer in layers])
    log_z = torch.stack([layer.logsumexp(dim=1) for layer in layers])
    load = torch.stack([torch.bincount(x.topk(K, dim=1).indices.flatten(), minlength=E).double() for x in layers])
    close = lambda value: pytest.approx(float(value), rel=1e-5)  # noqa: E731
    assert metrics["ce"] == close(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert metrics["entropy"] == close(-(p * p.log()).sum(dim=2).mean())
    assert metrics["load_cv"] == close((load.std(dim=1, correction=0) / load.mean(dim=1)).mean())
    assert metrics["router"]["load"] == load.tolist()
    assert metrics["router_log_z_p999"] == close(np.quantile(log_z.flatten().numpy(), 0.999))
    assert metrics["router_log_z_max"] == close(log_z.max())
    assert metrics["router_z"] == close(COEF / K * (log_z - math.log(E)).square().mean())
    assert (metrics["s_rel"], metrics["dropped_routes"]) == (1 / K, 0.0)
    assert metrics["router_absolute"] == close(COEF / (96 * L * K))
    # Capacity is that of one forward pass, four blocks and then two.
    over, routes = 0.0, 0.0
    for blocks in (slice(0, 4), slice(4, 6)):
        for layer in layers:
            chosen = layer.view(6, -1, E)[blocks].flatten(0, 1).topk(K, dim=1).indices
            counts = torch.bincount(chosen.flatten(), minlength=E)
            over += (counts - math.ceil(1.1 * chosen.shape[0] * K / E)).clamp_min(0).sum().item()
            routes += chosen.numel()
    assert over > 0
    assert metrics["over_capacity"] == close(over / routes)


def totals(config: TrainConfig, folder: Path) -> list[tuple[float, float]]:
    run_training(config, prepare_start(config), folder, options=RunOptions(checkpoint_every=0))
    return [(record.loss, record.grad_norm) for record in read_steps(folder)]


def test_accumulation_does_not_change_the_router_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Balancing is off: it is not linear in the batch. The test sees a reduction by the counts of each micro-batch."""
    moe = {"router": "active_route_mean", "router_coef": 5.0, "load_balance": 0.0}
    parted = tiny_moe_config(tmp_path, moe=moe, steps=3)
    whole = replace(parted, micro_batch=4, accumulate=1)
    want = totals(whole, tmp_path / "whole")
    assert totals(parted, tmp_path / "parted") == [pytest.approx(pair, rel=1e-5) for pair in want]

    literal = moe_module.reduced_router_loss
    monkeypatch.setattr(
        moe_module,
        "reduced_router_loss",
        lambda routing, **options: literal(routing, **{**options, "step_tokens": routing.tokens}),
    )
    wrong = totals(parted, tmp_path / "wrong")
    assert all(got != pytest.approx(pair, rel=1e-3) for got, pair in zip(wrong, want, strict=True))
