"""Audits kept by their setting: what is made again, what is read, and what happens to interrupted ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.paper.claim_tables import smoke
from zloss.audit.checkpoint.config import AuditConfig
from zloss.errors import CorpusError
from zloss_paper.engine.recipe import Overrides
from zloss_paper.engine.registry import find_recipe
from zloss_paper.engine.workbench import Workbench, audit_fingerprint


def test_audits_are_kept_in_the_folder_and_used_again(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = Overrides(models=(str(gpt2_folder),))
    first = Workbench(tmp_path)
    before = smoke("tab:spectral_audit", overrides, first)
    second = Workbench(tmp_path)
    after = smoke("tab:spectral_audit", overrides, second)
    assert (first.audits_made, second.audits_made) == (1, 0)
    assert after.record.to_dict()["rows"] == before.record.to_dict()["rows"]
    # The deployed perplexity is added to a kept audit without running it again.
    assert smoke("tab:pretrained", overrides, second).table.lines[1].cells["ppl"].value > 0
    assert second.audits_made == 0
    third = Workbench(tmp_path)
    smoke("tab:spectral_audit", replace(overrides, blocks=1), third)
    assert third.audits_made == 1


class StopsAfter:
    """A progress display that presses Ctrl-C once `batches` batches of the pass are done."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    @contextmanager
    def step(self, name: str, total: int | None, unit: str = "tokens") -> Iterator[StopsAfter]:
        self.counting = name == "audit"
        yield self

    def advance(self, amount: int) -> None:
        if self.counting and amount:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def test_an_interrupted_recipe_goes_on_where_it_stopped(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = Overrides(models=(str(gpt2_folder),), blocks=8)
    with pytest.raises(KeyboardInterrupt):
        smoke("tab:spectral_audit", overrides, Workbench(tmp_path, progress=StopsAfter(1)))
    assert not list(tmp_path.glob("audits/*/report.json"))
    assert list(tmp_path.glob("audits/*/audit-parts/part-*.npz"))
    resumed = smoke("tab:spectral_audit", overrides, Workbench(tmp_path))
    whole = smoke("tab:spectral_audit", overrides, Workbench())
    assert resumed.record.to_dict()["rows"] == whole.record.to_dict()["rows"]
    assert not list(tmp_path.glob("audits/*/audit-parts"))


def test_a_kept_audit_that_is_cut_off_is_made_again(gpt2_folder: Path, tmp_path: Path) -> None:
    overrides = Overrides(models=(str(gpt2_folder),))
    smoke("tab:spectral_audit", overrides, Workbench(tmp_path))
    (kept,) = tmp_path.glob("audits/*/report.json")
    kept.write_text(kept.read_text()[:100])
    again = Workbench(tmp_path)
    smoke("tab:spectral_audit", overrides, again)
    assert again.audits_made == 1


def test_settings_text_and_weights_make_an_audit(tmp_path: Path) -> None:
    text, moved, other = (tmp_path / name for name in ("text.txt", "moved.txt", "other.txt"))
    text.write_text("one text")
    moved.write_text("one text")
    other.write_text("another text")
    weights = tmp_path / "model"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"12")
    config = AuditConfig(model=str(weights), texts=(str(text),))
    same = audit_fingerprint(config)
    assert audit_fingerprint(replace(config, texts=(str(moved),))) == same
    assert audit_fingerprint(replace(config, texts=(str(other),))) != same
    assert audit_fingerprint(replace(config, blocks=7)) != same
    (weights / "model.safetensors").write_bytes(b"123")
    assert audit_fingerprint(config) != same
    with pytest.raises(CorpusError, match=r"none\.txt"):
        audit_fingerprint(replace(config, texts=(str(tmp_path / "none.txt"),)))


def test_an_extra_is_measured_once(gpt2_folder: Path, tmp_path: Path) -> None:
    (model,) = find_recipe("tab:spectral_audit").configure("smoke", Overrides(models=(str(gpt2_folder),))).rows
    calls = []

    def measure() -> dict[str, int]:
        calls.append(1)
        return {"seen": len(calls)}

    for bench in (Workbench(tmp_path), Workbench(tmp_path)):
        assert bench.audit(model.audit, {"mine": measure}).extra["mine"] == {"seen": 1}
    assert bench.audits_made == 0
    assert "mine" in bench.audit(model.audit).extra
