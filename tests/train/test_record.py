"""A plain loop that is recorded: the folder of `zloss train` with the same numbers, and a verdict of `zloss compare`."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zloss
from tests.train.tiny_run import tiny_config
from zloss.cli.main import main
from zloss.errors import InputError
from zloss.optimizer.recorder import LOSSES
from zloss.results.run_config import RecordedRun
from zloss.results.run_metrics import RunMetrics, read_metrics
from zloss.train.data import micro_batches
from zloss.train.folder import read_steps
from zloss.train.loss import LossModel, run_objective
from zloss.train.run import run_training
from zloss.train.start import initial_checkpoint, make_adamw, prepare_start

VOCAB, WIDTH, LENGTH = 50, 8, 12


class Plain(nn.Module):
    """A model from outside transformers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.embed(ids))) * 2


def rows(seed: int, count: int) -> torch.Tensor:
    """A text in which a token is likely to be followed by the next one."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.where(torch.rand(count, LENGTH + 1, generator=g) < 0.8, 1, 7)
    return steps.cumsum(dim=1) % VOCAB


def train_plain(
    folder: Path, objective: Any, seed: int, steps: int = 15, valid: torch.Tensor | None = None, **settings: Any
) -> Plain:
    model = Plain(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"settings": {"lr": 1e-2}, "options": zloss.RecordOptions(adam_every=5), "clip": 1.0} | settings
    batches = torch.Generator().manual_seed(seed)
    data = rows(0, 200)
    with zloss.record_run(
        folder,
        model,
        objective,
        seed=seed,
        validation=rows(99, 120) if valid is None else valid,
        optimizer=optimizer,
        head=model.head,
        hidden_of=model.hidden,
        **options,
    ) as run:
        for _ in range(steps):
            for _ in range(2):
                batch = data[torch.randint(len(data), (4,), generator=batches)]
                hidden = model.hidden(batch[:, :-1])
                out = zloss.head_loss(
                    hidden, model.head.weight, batch[:, 1:], objective, bias=model.head.bias, normalizer=8 * LENGTH
                )
                out.loss.backward()
                run.micro_batch(out, normalizer=8 * LENGTH)
            with run.step() as step:
                step.clip_()
                optimizer.step()
            optimizer.zero_grad()
    return model


def test_two_methods_and_two_seeds_get_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (1, 2):
        for objective in (zloss.CrossEntropy(), zloss.StandardZLoss(3e-2)):
            train_plain(tmp_path, objective, seed)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ce-0-s1", "ce-0-s2", "standard-0.03-s1", "standard-0.03-s2"]
    assert main(["compare", str(tmp_path)]) == 0
    assert "Standard" in capsys.readouterr().out
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    (verdict,) = comparison["quality"]["methods"]
    assert verdict["verdict"] in ("accepted", "rejected", "inconclusive")
    for part in ("coordinate", "quality"):
        interval = verdict["parts"][part]["interval"]
        assert interval["lower"] < interval["upper"], part
    assert comparison["quality"]["seed_varies"].startswith("the initial weights")
    assert main(["report", str(tmp_path / "comparison.json"), "--out", str(tmp_path / "page")]) == 0


def test_a_recorded_run_was_compared_under_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_plain(tmp_path, zloss.CrossEntropy(), 1, steps=3)
    shutil.copytree(tmp_path / "ce-0-s1", copy := tmp_path / "ce-0-s2")
    for name in ("config.json", "metrics.json"):
        data = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(data | {"seed": 2}))
    assert main(["compare", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "the same `loss` and `grad_norm`, bit for bit, at all 3 steps, but `seed` is 1 and 2" in error


def test_ce_of_every_block_is_that_of_the_trained_model(tmp_path: Path) -> None:
    valid = rows(99, 120)
    model = train_plain(tmp_path, zloss.CenteredZLoss(1e-2), 3, valid=valid)
    metrics = read_metrics(tmp_path / "centered-0.01-s3")
    logits = model.head(model.hidden(valid[:, :-1])).double()
    ce = F.cross_entropy(logits.flatten(0, 1), valid[:, 1:].flatten(), reduction="none").view(120, LENGTH)
    assert metrics.validation_blocks.tokens == (LENGTH,) * 120
    assert metrics.validation_blocks.ce == pytest.approx(ce.mean(dim=1).tolist(), rel=1e-5)
    assert metrics.ce == pytest.approx(ce.mean().item(), rel=1e-6)
    centered = (logits - logits.mean(dim=-1, keepdim=True)).logsumexp(-1) - math.log(VOCAB)
    wanted = centered.abs().flatten().quantile(0.999).item()
    assert metrics.p_z_999 == metrics.heads.centered.p_z_999 == pytest.approx(wanted, rel=1e-4)
    assert metrics.training.adam_samples == 3
    assert (metrics.tokens_consumed, metrics.tokens_available, metrics.reuse) == (15 * 8 * LENGTH, None, None)
    assert "did not report" in metrics.reasons["reuse"]
    assert "gradient" not in metrics.reasons


def test_gradients_of_a_custom_model_are_those_of_autograd(tmp_path: Path) -> None:
    valid, objective = rows(99, 20), zloss.StandardZLoss(1e-2)
    model = train_plain(tmp_path, objective, 4, valid=valid, steps=3)
    metrics = read_metrics(tmp_path / "standard-0.01-s4")
    model.double()
    few = valid[:8]
    z = model.head(model.hidden(few[:, :-1])).flatten(0, 1)
    log_z = z.logsumexp(1) - math.log(VOCAB)
    ce, aux = (
        torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0].flatten()
        for loss in (F.cross_entropy(z, few[:, 1:].flatten()), 1e-2 * log_z.square().mean())
    )
    assert metrics.gradients.r_aux == pytest.approx((aux.norm() / ce.norm()).item(), rel=1e-4)
    assert metrics.gradients.c_aux == pytest.approx(F.cosine_similarity(aux, ce, dim=0).item(), rel=1e-4)
    assert metrics.reasons["tied_paths"]


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("this kernel has no backward pass")


@pytest.mark.parametrize("why", ["without a graph", "RuntimeError: this kernel has no backward pass"])
def test_a_finished_run_is_kept_where_no_gradient_can_be_taken(tmp_path: Path, why: str) -> None:
    model, ce = Plain(1), zloss.CrossEntropy()

    def hidden_of(ids: torch.Tensor) -> torch.Tensor:
        found = NoBackward.apply(model.hidden(ids))
        return found.detach() if why == "without a graph" else found

    with zloss.record_run(
        tmp_path, model, ce, seed=1, validation=rows(1, 3), head=model.head, hidden_of=hidden_of
    ) as run:
        hidden, target = model.hidden(rows(2, 4)[:, :-1]), rows(2, 4)[:, 1:]
        out = zloss.head_loss(hidden, model.head.weight, target, ce, bias=model.head.bias)
        out.loss.backward()
        run.micro_batch(out)
        with run.step():
            pass
    assert run.metrics.gradients.gradient is None
    assert why in run.metrics.reasons["gradient"]
    assert read_metrics(tmp_path / "ce-0-s1").ppl > 1


def recorded_like_zloss_train(folder: Path, config: Any) -> RunMetrics:
    """The loop of `zloss train` written by hand around the recorder."""
    start = prepare_start(config)
    checkpoint, objective = initial_checkpoint(start, config), run_objective(config)
    model = LossModel(checkpoint, objective, "fused", start.data.train.counted).train()
    optimizer = make_adamw(model, config)
    options = zloss.RecordOptions(adam_every=config.adam_every, gradient_blocks=config.gradient_blocks)
    run = zloss.record_run(
        folder, checkpoint.model, objective, seed=config.seed, validation=start.data.valid, optimizer=optimizer,
        clip=config.clip, options=replace(options, tokens_available=start.data.train.predictions),
    )  # fmt: skip
    with run:
        for step in range(1, config.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = config.lr_at(step)
            for batch in micro_batches(config, start.data, step):
                torch.manual_seed(batch.seed)
                out, _ = model(batch.inputs_BT, batch.targets_BT, config.tokens_per_step)
                out.loss.backward()
                run.micro_batch(out, normalizer=config.tokens_per_step)
            with run.step() as opened:
                opened.clip_()
                optimizer.step()
            optimizer.zero_grad()
    return run.metrics


def test_the_numbers_are_those_of_zloss_train(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "files", method="standard", coef=1e-2, steps=6)
    wanted = run_training(config, prepare_start(config), tmp_path / "train")
    got = recorded_like_zloss_train(tmp_path / "recorded", config)
    for one, other in zip(read_steps(tmp_path / "recorded" / config.name), read_steps(tmp_path / "train"), strict=True):
        assert {**one.telemetry, "tokens": None} == {**other.telemetry, "tokens": None}
        for name in (*LOSSES, "grad_norm", "grad_inf", "param_norm", "postclip_norm", "lr"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6), name
        assert one.adam == other.adam
    left, right = got.to_dict(), wanted.to_dict()
    assert list(left) == list(right)
    compared = [
        "ppl",
        "ce",
        "heads",
        "validation_blocks",
        "gradient",
        "r_aux",
        "reuse",
        "phi_10",
        "clip_rate",
        "reasons",
    ]
    assert {name: left[name] for name in compared} == {name: right[name] for name in compared}


def test_a_pair_that_differs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_plain(tmp_path, zloss.CrossEntropy(), 1, steps=3)
    train_plain(tmp_path, zloss.StandardZLoss(1e-2), 1, steps=3, settings={"lr": 1e-3})
    assert main(["compare", str(tmp_path)]) == 2
    assert "settings.lr" in capsys.readouterr().err
    other = tmp_path / "weights"
    train_plain(other, zloss.CrossEntropy(), 1, steps=3)
    train_plain(other, zloss.StandardZLoss(1e-2), 1, steps=3)
    file = other / "ce-0-s1" / "config.json"
    file.write_text(file.read_text().replace(json.loads(file.read_text())["initial_weights"], "another"))
    assert main(["compare", str(other)]) == 2
    assert "initial_weights" in capsys.readouterr().err


def test_an_interrupted_run_is_unfinished_and_a_folder_of_another_is_refused(tmp_path: Path) -> None:
    model = Plain(1)

    def make(clip: float) -> Any:
        return zloss.record_run(
            tmp_path, model, zloss.CrossEntropy(), seed=1, validation=rows(1, 3), head=model.head,
            hidden_of=model.hidden, clip=clip,
        )  # fmt: skip

    kept = tmp_path / "ce-0-s1" / "checkpoints" / "last.ckpt"  # of the loop itself
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(KeyboardInterrupt), make(1.0):
        raise KeyboardInterrupt
    assert kept.exists()
    named = zloss.record_run(
        tmp_path, model, zloss.CrossEntropy(), seed=1, validation=rows(1, 3), head=model.head, hidden_of=model.hidden,
        method="mu-loss", coef=1e-4,
    )  # fmt: skip
    assert (named.folder.name, named.config.method, named.config.coef) == ("mu-loss-0.0001-s1", "mu-loss", 1e-4)
    folder = tmp_path / "ce-0-s1"
    assert RecordedRun.from_dict(json.loads((folder / "config.json").read_text())).clip == 1.0
    assert not (folder / "metrics.json").exists()
    with pytest.raises(InputError, match=r"`clip`: 1\.0 there, 2\.0 here"), make(2.0):
        pass
    with pytest.raises(InputError, match="without steps"), make(1.0):
        pass
    with pytest.raises(InputError, match="has no loss"), make(1.0) as run, run.step():
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": None, "hidden_of": None}, "not a transformers model"),
        ({"hidden_of": None}, "belong together"),
        ({"validation": [[1, 2, 77]]}, "50 rows"),
        ({"validation": torch.arange(9)}, r"\[B, N \+ 1\]"),
        ({"hidden_of": lambda ids: ids}, "hidden states"),
        ({"settings": {"f": print}}, "settings"),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Plain(1)
    given: dict[str, Any] = {"validation": rows(1, 3), "head": model.head, "hidden_of": model.hidden} | changes
    with pytest.raises(InputError, match=message):
        zloss.record_run(tmp_path, model, zloss.CrossEntropy(), seed=1, **given)


def test_a_loss_without_the_bias_of_the_head_is_refused(tmp_path: Path) -> None:
    """nn.Linear has a bias by default, and `head_loss` without `bias=` leaves it untrained while the model applies it."""
    objective = zloss.CrossEntropy()

    def first_step(name: str, model: Plain, **options: Any) -> None:
        batch, given = rows(1, 4), {"head": model.head, "hidden_of": model.hidden}
        run = zloss.record_run(tmp_path / name, model, objective, seed=1, validation=rows(2, 4), **given)
        run.start()
        out = zloss.head_loss(model.hidden(batch[:, :-1]), model.head.weight, batch[:, 1:], objective, **options)
        out.loss.backward()
        run.micro_batch(out)
        try:
            with run.step():
                pass
        finally:
            run.close()

    with pytest.raises(InputError, match=r"Pass `bias=head\.bias` to `head_loss`"):
        first_step("left out", Plain(1))
    model = Plain(1)
    first_step("passed", model, bias=model.head.bias)
    frozen, zero = Plain(1), Plain(1)
    frozen.head.bias.requires_grad_(False)
    first_step("frozen", frozen)
    torch.nn.init.zeros_(zero.head.bias)  # the loss is that of the model
    first_step("zero", zero)


def test_blocks_of_a_text_are_those_of_zloss_train(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, valid_texts=())
    start = prepare_start(config)
    blocks = zloss.validation_blocks(
        config.texts[0],
        start.checkpoint.tokenizer,
        block_size=config.block_size,
        blocks=config.valid_blocks,
        offset=start.data.valid.offset,
    )
    assert blocks.fingerprint() == start.data.valid.fingerprint()
