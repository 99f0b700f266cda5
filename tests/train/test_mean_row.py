"""The μ-loss and μ-centering, alone and as methods of a run; and a λ that is switched off at a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zloss
from tests.forked import forked_ranks
from tests.train.tiny_run import tiny_config
from zloss.errors import CoefficientError, InputError, ShapeError, TiedHeadError
from zloss.jobs import open_job
from zloss.models.output_head import find_head
from zloss.results.run_config import TrainConfig
from zloss.results.steps import StepRecord
from zloss.train import run as training
from zloss.train.compare import compare_runs
from zloss.train.finished import load_runs
from zloss.train.folder import read_steps
from zloss.train.grid import Grid, run_grid
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import Start, initial_checkpoint, prepare_start

V, D, COEF = 13, 5, 0.3
OPTIONS = RunOptions(checkpoint_every=4)


def table(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(
        torch.randn(V, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype) + 1
    )


def by_autograd(weight: Tensor, coef: float = COEF) -> tuple[float, Tensor]:
    """γ‖w̄‖² as written, and its gradient."""
    leaf = weight.detach().double().requires_grad_()
    loss = coef * leaf.mean(dim=0).square().sum()
    return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]


def test_the_mu_loss_has_the_gradient_of_its_definition_and_adds_it_to_what_is_there() -> None:
    weight, earlier = table(), torch.randn(V, D, dtype=torch.float64)
    value, gradient = by_autograd(weight)
    weight.grad = earlier.clone()
    assert float(zloss.mu_loss_(weight, COEF)) == pytest.approx(value, rel=1e-14)
    torch.testing.assert_close(weight.grad, earlier + gradient, rtol=1e-14, atol=0)
    for off in (None, 0.0):
        weight.grad = earlier.clone()
        assert float(zloss.mu_loss_(weight, off)) == 0.0
        assert torch.equal(weight.grad, earlier)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mu_centering_leaves_no_mean_row_and_the_softmax(dtype: torch.dtype) -> None:
    weight = table(dtype)
    before, eps = weight.detach().clone(), torch.finfo(dtype).eps
    assert zloss.mu_center_(weight) is weight
    assert float(weight.detach().double().mean(dim=0).norm()) <= 2 * eps
    moved = before.double() - weight.detach().double()
    torch.testing.assert_close(moved, moved[:1].expand(V, D), rtol=0, atol=4 * eps)


def test_bad_input_is_refused() -> None:
    with pytest.raises(CoefficientError, match="`coef`"):
        zloss.mu_loss_(table(), -1.0)
    with pytest.raises(ShapeError, match=r"\[V, D\]"):
        zloss.mu_center_(torch.ones(3))


def test_shards_of_the_vocabulary_have_the_mean_row_of_all_of_it() -> None:
    """Plain shards of unequal size, and DTensors sharded over rows, over columns and not at all."""
    value, gradient = by_autograd(table())
    centered = zloss.mu_center_(table().detach())

    def on_rank() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        with open_job() as job:
            mine = slice(0, 4) if job.first else slice(4, V)
            shard = nn.Parameter(table().detach()[mine].clone())
            assert float(zloss.mu_loss_(shard, COEF, group=job.group)) == pytest.approx(value, rel=1e-14)
            torch.testing.assert_close(shard.grad, gradient[mine], rtol=1e-13, atol=0)
            torch.testing.assert_close(zloss.mu_center_(shard.detach(), group=job.group), centered[mine])
            mesh = init_device_mesh("cpu", (2,))
            for placement in (Shard(0), Shard(1), Replicate()):
                weight = nn.Parameter(distribute_tensor(table().detach(), mesh, [placement]))
                assert float(zloss.mu_loss_(weight, COEF)) == pytest.approx(value, rel=1e-14)
                grad: Any = weight.grad
                torch.testing.assert_close(grad.full_tensor(), gradient, rtol=1e-13, atol=0)
                moved: Any = zloss.mu_center_(weight.detach())
                torch.testing.assert_close(moved.full_tensor(), centered)
            dist.barrier()

    forked_ranks(2, on_rank)


# As methods of a run


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    base = tiny_config(tmp_path_factory.mktemp("scratch"))
    return replace(base, model="scratch", from_config="tiny", train_tokenizer=300, coef=0.0)


@pytest.fixture(scope="module")
def start(scratch: TrainConfig) -> Start:
    """Text and tokenizer of all runs; each draws its weights from its seed."""
    return prepare_start(scratch)


def steps_of(config: TrainConfig, start: Start, folder: Path) -> list[StepRecord]:
    run_training(config, start, folder, options=OPTIONS)
    return [replace(record, seconds=None) for record in read_steps(folder)]


def first_gradient(config: TrainConfig, start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The gradient of the head that the first optimizer step receives."""
    seen: list[Tensor] = []
    own = torch.optim.AdamW.step

    def keep(self: Any, *args: Any) -> Any:
        seen.append(self.param_groups[0]["params"][0].grad.clone())
        return own(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", keep)
        steps_of(replace(config, steps=1, warmup=0, clip=1e9), start, folder)
    return seen[0]


@pytest.mark.parametrize(("micro_batch", "accumulate"), [(4, 1), (1, 4)])
def test_a_step_gets_the_gradient_of_the_mu_loss_once(
    scratch: TrainConfig,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    micro_batch: int,
    accumulate: int,
) -> None:
    config = replace(scratch, micro_batch=micro_batch, accumulate=accumulate)
    penalized = replace(config, method="mu-loss", coef=1e4)
    weight = find_head(initial_checkpoint(start, config)).weight_VD
    value, gradient = by_autograd(weight, 1e4)
    plain, added = (first_gradient(one, start, tmp_path / one.method, monkeypatch) for one in (config, penalized))
    torch.testing.assert_close((added - plain).double(), gradient, rtol=1e-3, atol=1e-6 * float(gradient.abs().max()))
    ce, mu = (read_steps(tmp_path / method)[0] for method in ("ce", "mu-loss"))
    assert mu.auxiliary == pytest.approx(value, rel=1e-6)
    assert mu.loss == pytest.approx(ce.loss + value, rel=1e-6)
    assert (mu.cross_entropy, mu.micro_batches) == (ce.cross_entropy, accumulate)


def test_two_processes_take_the_steps_of_one(scratch: TrainConfig, start: Start, tmp_path: Path) -> None:
    methods = [("mu-loss", 10.0), ("mu-centering", 0.0)]
    configs = [replace(scratch, method=method, coef=coef, steps=4, coef_until=3) for method, coef in methods]

    def on_rank() -> None:
        with open_job() as job:
            for config in configs:
                run_training(config, start, tmp_path / "ranks" / config.name, job=job)

    forked_ranks(2, on_rank)
    for config in configs:
        alone, ranks = steps_of(config, start, tmp_path / config.name), read_steps(tmp_path / "ranks" / config.name)
        for one, other in zip(alone, ranks, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-5)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            assert other.telemetry["z_unscaled"] == pytest.approx(one.telemetry["z_unscaled"], rel=1e-4)


def test_mu_centering_keeps_the_mean_row_at_rounding_after_every_step(
    scratch: TrainConfig, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms: list[tuple[float, float]] = []
    own = training.mu_center_

    def centered(weight: Tensor) -> Tensor:
        before = float(weight.detach().double().mean(dim=0).norm())
        own(weight)
        norms.append((before, float(weight.detach().double().mean(dim=0).norm())))
        return weight

    monkeypatch.setattr(training, "mu_center_", centered)
    config = replace(scratch, method="mu-centering")
    metrics = run_training(config, start, tmp_path / "run", options=OPTIONS)
    assert len(norms) == config.steps
    assert all(before > 1e-5 for before, _ in norms)
    assert all(after < 1e-8 for _, after in norms)
    assert metrics.heads.raw.mu_abs_99 < 1e-5


def test_a_pretrained_tied_head_is_not_mu_centered_unless_it_is_untied(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=2, warmup=0, method="mu-centering")
    with pytest.raises(InputError, match=r"mu-centering cannot be trained on .* untie it first"):
        run_grid(Grid(config, ("ce", "mu-centering"), (1e-4,), (1,)), tmp_path / "out")
    with pytest.raises(TiedHeadError, match="is tied"):
        run_training(config, prepare_start(config), tmp_path / "run")
    free = replace(config, untie=True)
    assert run_training(free, prepare_start(free), tmp_path / "free").heads.raw.mu_abs_99 is not None


def test_a_comparison_asks_both_whether_they_lower_the_shift(scratch: TrainConfig, tmp_path: Path) -> None:
    grid = Grid(replace(scratch, coef_until=9, valid_blocks=64), ("ce", "mu-loss", "mu-centering"), (1e-1,), (1, 2))
    run_grid(grid, tmp_path, options=RunOptions(checkpoint_every=0))
    names = {f"{name}-s{seed}" for name in ("ce-0", "mu-loss-0.1", "mu-centering-0") for seed in (1, 2)}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "coef_until" not in json.loads((tmp_path / "ce-0-s1" / "config.json").read_text())
    runs, _ = load_runs(tmp_path)
    comparison = compare_runs(runs)
    parts = {verdict.method: verdict.parts for verdict in comparison.quality.methods}
    assert parts.keys() == {"mu-loss", "mu-centering"}
    found = {method: part.coordinate for method, part in parts.items()}
    assert all("|μ|" in part.reason for part in found.values())
    assert found["mu-centering"].state == "holds"
    loss = next(run.record for run in runs if run.method == "mu-loss")
    assert loss.gradients.r_aux is None
    assert "r_aux" in loss.reasons


# A λ that is switched off


@pytest.mark.parametrize("method", ["centered", "gain-aware", "mu-loss"])
def test_from_coef_until_on_a_run_trains_as_ce(scratch: TrainConfig, start: Start, tmp_path: Path, method: str) -> None:
    """Off from the first step: CE bit for bit, with the penalty still measured. Off from step 3: λ and Z of every step."""
    ce = steps_of(replace(scratch, steps=4), start, tmp_path / "ce")
    config = replace(scratch, steps=4, method=method, coef=1e-2)
    never, always, until = (
        steps_of(replace(config, coef_until=step), start, tmp_path / f"{step}") for step in (1, 9, 3)
    )
    assert [replace(record, telemetry={}) for record in never] == [replace(record, telemetry={}) for record in ce]
    assert [record.telemetry["coef"] for record in until] == [1e-2, 1e-2, 0.0, 0.0]
    assert until[:2] == always[:2]
    assert [record.auxiliary for record in until[2:]] == [0.0, 0.0]
    assert until[2].cross_entropy == always[2].cross_entropy
    assert until[3].cross_entropy != always[3].cross_entropy
    for record in always:
        assert record.telemetry["z_unscaled"] == pytest.approx(record.auxiliary / 1e-2, rel=1e-5)
    assert until[2].telemetry["z_unscaled"] == pytest.approx(always[2].telemetry["z_unscaled"], rel=1e-6)
