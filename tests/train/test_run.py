"""A run against a straight loop, matched methods, and what a run leaves behind."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.tiny_run import tiny_config
from zloss.errors import InputError
from zloss.results.provenance import read_run_provenance
from zloss.results.run_config import TrainConfig
from zloss.train.data import batch_of
from zloss.train.folder import claim_settings, config_record, read_steps
from zloss.train.grid import Grid, run_grid
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import SHIFT_BLOCKS, initial_checkpoint, prepare_start

KEYS = """ppl ce coordinate diag_coef diag_z p_z_999 a_p_99 mu_abs_99 grad_norm_p99 grad_norm_p999 grad_norm_max
grad_inf_p99 grad_param_ratio_p99 postclip_norm_p99 clip_rate phi_10 phi_50 phi_100 nonfinite_gradient nonfinite_microbatch
loss_p99 loss_max spike_rate r_aux c_aux tied_paths adam_v_max adam_v_p99 adam_d_inf_p99 adam_d_ratio_p99 tokens_consumed
tokens_available reuse"""
METHODS = ("ce", "centered-head", "standard", "centered", "factorized", "gain-aware")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainConfig]:
    """All methods of the paper on one tied model with scaled logits and without dropout, one seed."""
    folder = tmp_path_factory.mktemp("grid")
    config = tiny_config(folder, kind="granite")
    run_grid(Grid(config, METHODS, (1e-2,), (1,)), folder / "out", options=RunOptions(checkpoint_every=5))
    return folder / "out", config


def metrics(grid: tuple[Path, TrainConfig], method: str) -> dict[str, Any]:
    coef = "0" if method in ("ce", "centered-head") else "0.01"
    return json.loads((grid[0] / f"{method}-{coef}-s1" / "metrics.json").read_text())


def straight_loss(method: str, coef: float, logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The paper's definitions on whole logits, with autograd."""
    c = math.log(logits.shape[-1])
    log_z, mu = torch.logsumexp(logits, -1), logits.mean(-1)
    p = torch.softmax(logits, -1)
    gain = ((p @ weight).norm(dim=-1) / p.norm(dim=-1)).detach()
    extra = {
        "ce": 0 * log_z,
        "centered-head": 0 * log_z,
        "standard": coef * (log_z - c) ** 2,
        "centered": coef * (log_z - mu - c) ** 2,
        "factorized": coef * mu**2 + coef * (log_z - mu - c) ** 2,
        "gain-aware": coef * (log_z - c) ** 2 / (1 + 1e-2 * gain**2),
    }[method]
    return (F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none") + extra.flatten()).mean()


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_norms_equal_a_straight_loop(grid: tuple[Path, TrainConfig], method: str) -> None:
    """The same run by hand: whole batches, materialized logits, torch's clipping, torch's AdamW."""
    coef = 0.0 if method in ("ce", "centered-head") else 1e-2
    config = replace(grid[1], method=method, coef=coef)
    start = prepare_start(config)
    model: Any = initial_checkpoint(start, config).model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.95)
    )
    records = read_steps(grid[0] / config.name)
    assert [record.step for record in records] == list(range(1, 13))
    for record in records[:6]:
        inputs, targets = start.data.train.batch(batch_of(start.data.train, 1, record.step, 4))
        logits = model(input_ids=inputs).logits
        loss = straight_loss(method, coef, logits, targets, model.get_output_embeddings().weight / 4)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = record.lr
        optimizer.step()
        assert record.loss == pytest.approx(float(loss.detach()), rel=2e-5)
        assert record.grad_norm == pytest.approx(float(norm), rel=2e-4)
    assert records[0].lr == pytest.approx(0.5e-3)
    assert records[2].lr == pytest.approx(1e-3)


def test_metrics_have_every_key_and_only_json_numbers(grid: tuple[Path, TrainConfig]) -> None:
    for method in METHODS:
        found = metrics(grid, method)
        assert [key for key in KEYS.split() if key not in found] == []
        assert found["coordinate"] == ("centered" if method.startswith("centered") else "raw")
        assert found["p_z_999"] == found["heads"][found["coordinate"]]["p_z_999"]
        assert found["tokens_consumed"] == 12 * 4 * 24
        assert found["reuse"] == pytest.approx(found["tokens_consumed"] / found["tokens_available"])
        assert found["adam_samples"] == 3
        if method not in ("ce", "centered-head"):
            assert found["r_aux"] > 0
            assert -1 <= found["c_aux"] <= 1
            assert found["tied_paths"]["input_norm"] > 0
        else:
            assert found["r_aux"] == 0
            assert found["c_aux"] is None
            assert "c_aux" in found["reasons"]


def test_validation_equals_a_straight_evaluation(grid: tuple[Path, TrainConfig], tmp_path: Path) -> None:
    config = replace(grid[1], method="standard", coef=1e-2, steps=4, adam_every=2)
    start = prepare_start(config)
    before = torch.random.get_rng_state()
    found = run_training(
        config, start, tmp_path / "run", options=RunOptions(save_model=True, checkpoint_every=0)
    ).to_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float64).eval()
    with torch.no_grad():
        logits = model(input_ids=start.data.valid.inputs(0, 6)).logits
        ce = float(F.cross_entropy(logits.flatten(0, 1), start.data.valid.targets(0, 6).flatten()))
        violation = (torch.logsumexp(logits, -1) - math.log(512)).abs()
    assert found["ce"] == pytest.approx(ce, rel=1e-5)
    assert found["ppl"] == pytest.approx(math.exp(ce), rel=1e-4)
    assert found["p_z_999"] == pytest.approx(float(violation.quantile(0.999)), rel=1e-4)


def test_fused_centered_head_trains_bit_for_bit_as_ce(grid: tuple[Path, TrainConfig]) -> None:
    ce, centered = (read_steps(grid[0] / f"{method}-0-s1") for method in ("ce", "centered-head"))
    quiet = [replace(record, seconds=None, telemetry={}) for record in ce]
    assert quiet == [replace(record, seconds=None, telemetry={}) for record in centered]
    raw, deployed = metrics(grid, "ce"), metrics(grid, "centered-head")
    assert raw["heads"] == deployed["heads"]
    assert raw["ppl"] == deployed["ppl"]
    assert raw["p_z_999"] != deployed["p_z_999"]


def test_paper_head_agrees_in_fp32_and_parts_ways_in_bf16(tmp_path: Path, grid: tuple[Path, TrainConfig]) -> None:
    """In fp32 the two heads train the same run up to rounding; in bf16 Centered head leaves CE's trajectory."""
    methods = ("ce", "centered-head", "centered", "factorized", "gain-aware")
    for precision in ("fp32", "bf16"):
        config = replace(grid[1], head="paper", precision=precision, steps=8, adam_every=4)
        run_grid(Grid(config, methods, (1e-2,), (1,)), tmp_path / precision, options=RunOptions(checkpoint_every=0))
    for method in methods:
        name = f"{method}-{'0' if method in ('ce', 'centered-head') else '0.01'}-s1"
        paper, fused = read_steps(tmp_path / "fp32" / name)[:2], read_steps(grid[0] / name)[:2]
        for a, b in zip(paper, fused, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=2e-5)
            assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)
    ce, centered = (read_steps(tmp_path / "bf16" / f"{method}-0-s1") for method in ("ce", "centered-head"))
    assert [record.grad_norm for record in ce] != [record.grad_norm for record in centered]
    assert ce[0].loss == pytest.approx(centered[0].loss, rel=1e-3)


def test_finished_runs_are_skipped_and_other_settings_refused(grid: tuple[Path, TrainConfig]) -> None:
    said: list[str] = []
    file = grid[0] / "ce-0-s1" / "metrics.json"
    before = file.stat().st_mtime_ns
    assert read_run_provenance(file.parent).row_pass == "torch"
    run_grid(Grid(grid[1], ("ce",), (1e-2,), (1,)), grid[0], say=said.append)
    assert said == ["ce-0-s1: finished before, skipped"]
    assert file.stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"other settings \(`lr`: \S+ there, \S+ here"):
        run_grid(Grid(replace(grid[1], lr=2e-3), ("ce",), (1e-2,), (1,)), grid[0])


def test_other_initial_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    start = prepare_start(config)
    for _ in range(2):
        claim_settings(tmp_path / "run", config_record(config, start).to_dict())
    with torch.no_grad():
        start.checkpoint.model.get_output_embeddings().weight[9, 9] += 1e-3
    with pytest.raises(InputError, match=r"other settings \(`initial_weights` differs"):
        claim_settings(tmp_path / "run", config_record(config, start).to_dict())


def test_nonfinite_gradients_are_counted_and_not_stepped_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, method="standard", coef=1e38, steps=3, warmup=1, adam_every=1)
    start = prepare_start(config)
    before = [p.clone() for p in initial_checkpoint(start, config).model.parameters()]
    found = run_training(
        config, start, tmp_path / "run", options=RunOptions(save_model=True, checkpoint_every=0)
    ).to_dict()
    assert found["nonfinite_gradient"] == found["phi_100"] == 1.0
    assert found["skipped_updates"] == 3
    assert found["grad_norm_max"] is None
    from transformers import AutoModelForCausalLM

    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32).parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_model_from_scratch_and_a_shifted_head(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    scratch = replace(config, model="scratch", from_config="tiny", train_tokenizer=300, untie=True, head_shift=40.0)
    start = prepare_start(scratch)
    first, again, other = (
        initial_checkpoint(start, replace(scratch, seed=seed)).model.state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    one = replace(scratch, steps=1, warmup=0, lr=1e-12, adam_every=1)
    found = run_training(one, start, tmp_path / "run", options=RunOptions(checkpoint_every=0)).to_dict()
    # The size is that of the first training blocks; the few validation tokens of another text may have another tail.
    shifted = initial_checkpoint(start, scratch)
    inputs, _ = start.data.train.batch(torch.arange(SHIFT_BLOCKS))
    with torch.no_grad():
        mu = start.data.train.counted(shifted.model(inputs).logits).double().mean(dim=-1).flatten()
    assert float(mu.abs().quantile(0.99)) == pytest.approx(40.0, rel=1e-3)
    assert 20 < found["heads"]["raw"]["mu_abs_99"] < 60
    assert found["heads"]["centered"]["p_z_999"] < 5
    assert found["tied_paths"] is None


def test_a_trainer_that_was_left_in_the_middle_of_its_accumulation_changes_nothing(tmp_path: Path) -> None:
    from accelerate.state import GradientState

    config = replace(tiny_config(tmp_path), steps=2, warmup=0, adam_every=1)
    GradientState().sync_gradients = False
    try:
        found = run_training(config, prepare_start(config), tmp_path / "run", options=RunOptions(checkpoint_every=0))
    finally:
        GradientState._reset_state()
    assert found.training.adam_samples == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`steps`"),
        ({"lr": math.nan}, "`lr`"),
        ({"target": math.nan}, "`target`"),
        ({"gain_beta": math.nan}, "`gain_beta`"),
        ({"seed": -1}, "`seed`"),
        ({"from_config": "tiny", "train_tokenizer": 0}, "`train_tokenizer`"),
        ({"method": "ce", "coef": 1e-4}, "no penalty"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig(**changes)


def test_bf16_is_autocast_over_fp32_weights(tmp_path: Path, grid: tuple[Path, TrainConfig]) -> None:
    """Fused CE and centered head stay bit-equal; the weights move by steps that bf16 could not hold."""
    config = replace(grid[1], precision="bf16", steps=3, warmup=1, lr=1e-5, adam_every=1)
    options = RunOptions(checkpoint_every=0, save_model=True)
    run_grid(Grid(config, ("ce", "centered-head"), (1e-2,), (1,)), tmp_path, options=options)
    ce, centered = (read_steps(tmp_path / f"{method}-0-s1") for method in ("ce", "centered-head"))
    assert [(a.loss, a.grad_norm, a.adam) for a in ce] == [(b.loss, b.grad_norm, b.adam) for b in centered]
    full = read_steps(grid[0] / "ce-0-s1")[0]
    assert ce[0].loss != full.loss
    assert ce[0].loss == pytest.approx(full.loss, rel=1e-2)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "ce-0-s1" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())
