"""Audits and runs kept by their setting: what makes two the same, what is read, and what happens to interrupted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.paper.claim_tables import smoke
from zloss.audit.config import AuditConfig
from zloss.errors import CorpusError
from zloss.results.run_config import MoeRun, TrainConfig
from zloss_paper.engine.recipe import Overrides
from zloss_paper.engine.workbench import Workbench, audit_fingerprint, run_fingerprint
from zloss_paper.training.settings import SMOKE, base_config

MOE = MoeRun(top_k=2, layers=1, width=16, heads=2, expert_width=8)
SMALL = {"blocks": 16, "valid_blocks": 2, "block_size": 16, "steps": 4, "warmup": 1, "micro_batch": 2}
EXPERTS = TrainConfig(model="moe", moe=MOE, train_tokenizer=300, corpus="pydoc", gradient_blocks=0, **SMALL)
BASE = base_config(SMOKE, ())


class Watched:
    """A progress display that counts prepared starts, and presses Ctrl-C after some batches of an audit."""

    def __init__(self, batches: int = 10**6) -> None:
        self.left, self.starts = batches, 0

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[Watched]:
        self.counting = name == "audit"
        self.starts += name == "tokens and weights"
        yield self

    def advance(self, amount: int) -> None:
        if self.counting and amount:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def test_audits_are_kept_in_the_folder_and_used_again(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = Overrides(models=(str(gpt2_folder),))
    first, second, third, fourth = (Workbench(tmp_path) for _ in range(4))
    before = smoke("tab:spectral_audit", overrides, first)
    after = smoke("tab:spectral_audit", overrides, second)
    assert (first.audits_made, second.audits_made) == (1, 0)
    assert after.record.to_dict()["rows"] == before.record.to_dict()["rows"]
    # The deployed perplexity is added to a kept audit without running it again.
    assert smoke("tab:pretrained", overrides, second).table.lines[1].cells["ppl"].value > 0
    assert second.audits_made == 0
    smoke("tab:spectral_audit", replace(overrides, blocks=1), third)
    assert third.audits_made == 1
    # Reports that are cut off are made again.
    for kept in tmp_path.glob("audits/*/report.json"):
        kept.write_text(kept.read_text()[:100])
    smoke("tab:spectral_audit", overrides, fourth)
    assert fourth.audits_made == 1


def test_an_interrupted_recipe_resumes_where_it_stopped(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = Overrides(models=(str(gpt2_folder),), blocks=8)
    with pytest.raises(KeyboardInterrupt):
        smoke("tab:spectral_audit", overrides, Workbench(tmp_path, progress=Watched(1)))
    assert not list(tmp_path.glob("audits/*/report.json"))
    assert list(tmp_path.glob("audits/*/audit-parts/part-*.npz"))
    resumed = smoke("tab:spectral_audit", overrides, Workbench(tmp_path))
    whole = smoke("tab:spectral_audit", overrides, Workbench())
    assert resumed.record.to_dict()["rows"] == whole.record.to_dict()["rows"]
    assert not list(tmp_path.glob("audits/*/audit-parts"))


def test_every_setting_the_text_and_the_start_make_a_run(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("text.txt", "moved.txt", "other.txt")}
    for name, file in files.items():
        file.write_text("another text" if name == "other.txt" else "one text")
    text, moved, other = ((str(file),) for file in files.values())
    config = TrainConfig(texts=text)
    shape = Path(BASE.from_config or "")
    wider = tmp_path / shape.name
    wider.write_text(shape.read_text().replace('"n_layer": 1', '"n_layer": 2'))
    keys = [
        run_fingerprint(config, BASE),
        run_fingerprint(config),
        run_fingerprint(config, replace(BASE, steps=13)),
        run_fingerprint(config, replace(BASE, from_config=str(wider))),
        *(run_fingerprint(replace(config, **{name: value}), BASE)
          for name, value in {"seed": 2, "lr": 1e-3, "head": "paper", "untie": True, "steps": 201, "texts": other}.items()),
        run_fingerprint(replace(config, method="standard", coef=1e-4), BASE),
        run_fingerprint(EXPERTS),
        *(run_fingerprint(replace(EXPERTS, moe=replace(MOE, **{name: value})))
          for name, value in {"top_k": 1, "tokenizer": "gpt2", "router": "token_layer_mean"}.items()),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    # A moved text is the same text, and an option that is off changes nothing.
    assert run_fingerprint(replace(config, texts=moved, valid_offset=None), BASE) == keys[0]
    with pytest.raises(CorpusError, match=r"none\.txt"):
        run_fingerprint(replace(config, texts=(str(tmp_path / "none.txt"),)))


def test_a_label_is_not_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model from scratch is only named: a folder of that name changes nothing."""
    before = run_fingerprint(EXPERTS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "file").write_text("x")
    assert run_fingerprint(EXPERTS) == before


def test_settings_text_and_weights_make_an_audit(tmp_path: Path) -> None:
    text, weights = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("one text")
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"12")
    config = AuditConfig(model=str(weights), texts=(str(text),))
    same = audit_fingerprint(config)
    assert audit_fingerprint(replace(config, blocks=7)) != same
    (weights / "model.safetensors").write_bytes(b"123")
    assert audit_fingerprint(config) != same


@pytest.mark.parametrize("damage", ["the model is missing", "metrics.json is cut off"])
def test_a_damaged_start_is_trained_again(tmp_path: Path, damage: str) -> None:
    before = Workbench(tmp_path).pretrained(BASE)
    if damage == "the model is missing":
        (before.folder / "model").rename(before.folder / "elsewhere")
    else:
        file = before.folder / "metrics.json"
        file.write_text(file.read_text()[:200])
    again = Workbench(tmp_path)
    assert again.pretrained(BASE).metrics == before.metrics
    assert (before.folder / "model").is_dir()
    assert again.runs_trained == 1


def router(name: str) -> TrainConfig:
    return replace(EXPERTS, moe=replace(MOE, router=name, router_coef=0.0 if name == "none" else 1e-3))


def test_runs_with_experts_are_made_once_and_share_their_start(tmp_path: Path) -> None:
    progress = Watched()
    bench = Workbench(tmp_path, progress=progress)
    names = ("none", "token_layer_mean", "active_route_sum:matched")
    runs = [bench.run(replace(router(name), seed=seed)) for seed in (1, 2) for name in names]
    assert bench.runs_trained == len({run.folder for run in runs}) == 6
    assert progress.starts == 1
    assert bench.run(router("none")) is runs[0]
    again = Workbench(tmp_path)
    assert again.run(router("token_layer_mean")).metrics == runs[1].metrics
    assert again.runs_trained == 0
    in_memory = Workbench()
    assert in_memory.run(EXPERTS) is in_memory.run(EXPERTS)
    assert in_memory.runs_trained == 1
