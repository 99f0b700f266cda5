"""Runs kept by their setting: what makes two runs the same, for dense runs and for runs with experts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from zloss.errors import InputError
from zloss.results.run_config import MoeRun, TrainConfig
from zloss.train.folder import read_steps
from zloss_paper.engine.workbench import Workbench, run_fingerprint
from zloss_paper.training.settings import SMOKE, base_config


def test_every_setting_the_text_and_the_start_count(tmp_path: Path) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("one text")
    other.write_text("another text")
    config = TrainConfig(texts=(str(text),))
    base = base_config(SMOKE, ())
    same = run_fingerprint(config, base)
    changed = (
        replace(config, seed=2),
        replace(config, lr=1e-3),
        replace(config, method="standard", coef=1e-4),
        replace(config, texts=(str(other),)),
        replace(config, head="paper"),
        replace(config, untie=True),
        replace(config, steps=201),
    )
    keys = {run_fingerprint(one, base) for one in changed} | {run_fingerprint(config, replace(base, steps=13))}
    assert len(keys) == len(changed) + 1
    assert same not in keys
    assert run_fingerprint(config) != same


def test_a_moved_text_is_the_same_text_and_a_new_option_that_is_off_changes_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "folder" / "b.txt"
    second.parent.mkdir()
    for file in (first, second):
        file.write_text("the same text")
    one, two = (TrainConfig(texts=(str(file),)) for file in (first, second))
    assert run_fingerprint(one) == run_fingerprint(two)
    assert run_fingerprint(replace(one, valid_offset=None)) == run_fingerprint(one)
    with pytest.raises(InputError, match=r"none\.txt"):
        run_fingerprint(replace(one, texts=(str(tmp_path / "none.txt"),)))


def test_another_shape_of_the_start_is_another_start(tmp_path: Path) -> None:
    base = base_config(SMOKE, ())
    assert base.from_config is not None
    wider = tmp_path / Path(base.from_config).name
    wider.write_text(Path(base.from_config).read_text().replace('"n_layer": 1', '"n_layer": 2'))
    assert run_fingerprint(replace(base, from_config=str(wider))) != run_fingerprint(base)


def test_a_start_without_its_model_is_trained_again(tmp_path: Path) -> None:
    base = base_config(SMOKE, ())
    folder = Workbench(tmp_path).pretrained(base).folder
    (folder / "model").rename(folder / "elsewhere")
    again = Workbench(tmp_path)
    assert (again.pretrained(base).folder / "model").is_dir()
    assert again.runs_trained == 1


EXPERTS = TrainConfig(
    model="moe",
    moe=MoeRun(top_k=2, layers=1, width=16, heads=2, expert_width=8),
    train_tokenizer=300,
    corpus="pydoc",
    blocks=16,
    valid_blocks=2,
    block_size=16,
    steps=4,
    warmup=1,
    micro_batch=2,
    gradient_blocks=0,
)


def router(name: str) -> TrainConfig:
    assert EXPERTS.moe is not None
    return replace(EXPERTS, moe=replace(EXPERTS.moe, router=name, router_coef=0.0 if name == "none" else 1e-3))


def test_a_router_loss_and_a_shape_are_other_runs(tmp_path: Path) -> None:
    assert EXPERTS.moe is not None
    changed = (
        router("token_layer_mean"),
        replace(EXPERTS, moe=replace(EXPERTS.moe, top_k=1)),
        replace(EXPERTS, moe=replace(EXPERTS.moe, tokenizer="gpt2")),
        replace(EXPERTS, seed=2),
    )
    keys = {run_fingerprint(one) for one in changed}
    assert len(keys) == len(changed)
    assert run_fingerprint(EXPERTS) not in keys


def test_a_label_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from scratch is only named: a folder of that name changes nothing."""
    before = run_fingerprint(EXPERTS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "file").write_text("x")
    assert run_fingerprint(EXPERTS) == before


class CountsStarts:
    """Counts how often tokens and weights are prepared."""

    def __init__(self) -> None:
        self.starts = 0

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[CountsStarts]:
        self.starts += name == "tokens and weights"
        yield self

    def advance(self, amount: int) -> None:
        pass


def test_runs_with_experts_are_made_once_and_share_their_start(tmp_path: Path) -> None:
    progress = CountsStarts()
    bench = Workbench(tmp_path, progress=progress)
    names = ("none", "token_layer_mean", "active_route_sum:matched")
    runs = [bench.run(replace(router(name), seed=seed)) for seed in (1, 2) for name in names]
    assert bench.runs_trained == len({run.folder for run in runs}) == 6
    assert progress.starts == 1
    assert bench.run(router("none")) is runs[0]
    again = Workbench(tmp_path)
    assert again.run(router("token_layer_mean")).metrics == runs[1].metrics
    assert again.runs_trained == 0


def test_an_interrupted_run_with_experts_goes_on(tmp_path: Path) -> None:
    class Stops(CountsStarts):
        def advance(self, amount: int) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Workbench(tmp_path / "a", progress=Stops()).run(EXPERTS)
    assert not list(tmp_path.glob("a/runs/*/metrics.json"))
    resumed = Workbench(tmp_path / "a").run(EXPERTS)
    whole = Workbench(tmp_path / "b").run(EXPERTS)
    assert resumed.metrics == whole.metrics
    assert [step.loss for step in read_steps(resumed.folder)] == [step.loss for step in read_steps(whole.folder)]


def test_without_a_folder_runs_are_kept_for_the_call() -> None:
    bench = Workbench()
    assert bench.run(EXPERTS) is bench.run(EXPERTS)
    assert bench.runs_trained == 1
