"""A model that accelerate places, with weights on disk that are in memory only while their module runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.audit.checkpoint.test_run import CONFIG
from tests.tiny_models import save_model
from zloss.audit.checkpoint import run
from zloss.audit.checkpoint.run import run_audit
from zloss.cli.main import main
from zloss.errors import InputError
from zloss.jobs import Job
from zloss.measure.measurement import measurement_of
from zloss.models.checkpoint import is_offloaded, load_checkpoint, model_fingerprint, weight_fingerprint
from zloss.models.output_head import find_head

LITTLE = {"cpu": 60_000}
"""Less than any of the models: the rest goes to disk."""
KINDS = ("gpt2", "phi", "mixtral")
"""A tied head, an untied one with a bias, and experts."""


@pytest.mark.parametrize("kind", KINDS)
def test_head_spectrum_and_fingerprint_of_an_offloaded_model(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    plain = load_checkpoint(str(folders[kind]))
    placed = load_checkpoint(str(folders[kind]), device_map="auto", max_memory=LITTLE)
    assert is_offloaded(placed.model)
    assert not is_offloaded(plain.model)
    head, want = find_head(placed), find_head(plain)
    assert (head.tied, head.vocab, head.width) == (want.tied, want.vocab, want.width)
    assert torch.equal(head.weight_VD, want.weight_VD.detach())
    assert (head.bias_V is None) == (want.bias_V is None)
    assert measurement_of(head, coef=1e-4).spectrum("raw").sigma.tolist() == pytest.approx(
        measurement_of(want, coef=1e-4).spectrum("raw").sigma.tolist()
    )
    assert model_fingerprint(placed) == model_fingerprint(
        load_checkpoint(str(folders[kind]), device_map="auto", max_memory=LITTLE)
    )
    assert weight_fingerprint(placed.model) == weight_fingerprint(plain.model)
    other = load_checkpoint(str(save_model(kind, tmp_path, seed=1)), device_map="auto", max_memory=LITTLE)
    assert weight_fingerprint(other.model) != weight_fingerprint(placed.model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_with_weights_on_disk_has_the_numbers_of_one_without(
    kind: str, folders: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = load_checkpoint

    def little(*args: Any, **options: Any) -> Any:
        assert options["device_map"] == "auto"
        return straight(*args, **options, max_memory=LITTLE)

    config = dataclasses.replace(CONFIG, model=str(folders[kind]), texts=(str(text),), blocks=6)
    want = run_audit(config)
    monkeypatch.setattr(run, "load_checkpoint", little)
    found = run_audit(dataclasses.replace(config, device_map="auto"), folder=tmp_path)
    assert dataclasses.asdict(found.heads.raw) == pytest.approx(dataclasses.asdict(want.heads.raw), rel=1e-6)
    assert found.ppl == pytest.approx(want.ppl, rel=1e-6)
    assert found.gradient is None
    assert "offloaded (device_map)" in found.to_dict()["reasons"]["gradient"]
    assert "offloaded (device_map)" in found.to_dict()["reasons"]["router"]
    assert found.router is None


def test_a_model_that_fits_has_every_section(folders: dict[str, Path], text: Path) -> None:
    config = dataclasses.replace(CONFIG, model=str(folders["gpt2"]), texts=(str(text),), blocks=6)
    placed, want = run_audit(dataclasses.replace(config, device_map="auto")), run_audit(config)
    assert placed.gradient == want.gradient
    assert placed.tied_paths == want.tied_paths
    assert placed.heads == want.heads


def test_several_processes_refuse_a_device_map_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "together", lambda job, make, *args: make(*args))
    with pytest.raises(InputError, match=r"`device_map` places one model .* there are 2 processes"):
        run.run_audit_of(Job(0, 2), dataclasses.replace(CONFIG, device_map="auto"))


def test_the_command_takes_the_option(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    argv = ["audit", str(folders["gpt2"]), "--text", str(text), "--blocks", "4", "--block-size", "32", "--quiet"]
    argv += ["--no-figures", "--device-map", "auto", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert (tmp_path / "out" / "tokens.parquet").is_file()
