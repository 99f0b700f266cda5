"""Drift over checkpoints: which folders are checkpoints, their order, and a shift that CE cannot see is named with its step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.protocol.tiny_drift_run import STEPS, save_run, tiny_drift
from tests.tiny_models import save_tokenizer
from zloss.errors import CheckpointError, CorpusError, InputError, ZlossError
from zloss.protocol import drift as drift_module
from zloss.protocol.config import DriftConfig
from zloss.protocol.drift import find_places, run_drift, run_name, step_of
from zloss.results.drift import Drift, KeptCheckpoint
from zloss.results.files import read_record


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("step143000", 143000),
        ("global_step1000", 1000),
        ("stage1-step500-tokens2B", 500),
        ("iter_0000250", 250),
        ("0042", 42),
        ("7b-run-300", 300),
        ("final", None),
    ],
)
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_a_folder_of_checkpoints_gives_those_inside_in_numeric_order(tmp_path: Path) -> None:
    for name in ("checkpoint-1000", "checkpoint-500", "checkpoint-90"):
        checkpoint(tmp_path / "run" / name)
    checkpoint(tmp_path / "run" / "best")  # no step in its name
    (tmp_path / "run" / "logs-7").mkdir()  # no checkpoint
    (tmp_path / "run" / "config.json").write_text("{}")  # the model at the end of the run, which has no step
    config = DriftConfig(checkpoints=(str(tmp_path / "run"),))
    places = find_places(config)
    assert [place.step for place in places] == [90, 500, 1000]
    assert run_name(config, places) == "run"


def test_revisions_of_a_hub_model() -> None:
    config = DriftConfig(checkpoints=("EleutherAI/pythia-70m",), revisions=("step2000", "step512"))
    places = find_places(config)
    assert [(place.step, place.revision, place.model) for place in places] == [
        (512, "step512", "EleutherAI/pythia-70m"),
        (2000, "step2000", "EleutherAI/pythia-70m"),
    ]
    assert run_name(config, places) == "EleutherAI/pythia-70m"


def test_what_cannot_be_ordered_is_refused(tmp_path: Path) -> None:
    one, same = checkpoint(tmp_path / "a" / "checkpoint-5"), checkpoint(tmp_path / "b" / "step5")
    nameless, empty = checkpoint(tmp_path / "final"), checkpoint(tmp_path / "checkpoint-9")
    (empty / "model.safetensors").unlink()
    cases: list[tuple[type[Exception], str, DriftConfig]] = [
        (InputError, "two checkpoints for step 5", DriftConfig(checkpoints=(str(one), str(same)))),
        (InputError, "'final' has no number", DriftConfig(checkpoints=(str(one), str(nameless)))),
        (CheckpointError, "has no weights", DriftConfig(checkpoints=(str(one), str(empty)))),
        (InputError, "names 2", DriftConfig(checkpoints=("a/b", "a/c"), revisions=("step1", "step2"))),
    ]
    for kind, sentence, config in cases:
        with pytest.raises(kind, match=sentence):
            find_places(config)


BEGAN = 1000
"""The shift is there from the fourth checkpoint on."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("grown"), (0, 0, 0, 2, 4, 6))


@pytest.fixture(scope="module")
def measured(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Drift, Path]:
    folder = tmp_path_factory.mktemp("out")
    return run_drift(tiny_drift(run), folder), folder


@pytest.fixture
def kept(measured: tuple[Drift, Path], tmp_path: Path) -> Path:
    """A copy of the finished folder, to be damaged."""
    return Path(shutil.copytree(measured[1], tmp_path / "kept"))


def count_audits(monkeypatch: pytest.MonkeyPatch, *, fail_at: int | None = None) -> list[str]:
    """The names of the checkpoints that are really audited from now on; the process ends during number `fail_at`."""
    done: list[str] = []
    audit = drift_module.run_audit_of

    def counted(job: Any, config: Any, **options: Any) -> Any:
        if fail_at is not None and len(done) + 1 == fail_at:
            raise SystemExit("killed")
        done.append(config.model)
        return audit(job, config, **options)

    monkeypatch.setattr(drift_module, "run_audit_of", counted)
    return done


def without_time(drift: Drift) -> Drift:
    return replace(drift, provenance=replace(drift.provenance, started="", seconds=0.0))


def test_a_grown_common_shift_is_named_with_the_step_at_which_it_began(measured: tuple[Drift, Path]) -> None:
    drift, _ = measured
    # In numeric order.
    assert tuple(checkpoint.step for checkpoint in drift.checkpoints) == STEPS
    assert drift.checkpoints[3].name == "checkpoint-1000"
    assert drift.began == BEGAN
    states = {(movement.quantity, movement.coordinate): movement for movement in drift.movements}
    shift = states["mu_abs_99", "raw"]
    assert (shift.state, shift.last_before, shift.began) == ("invisible", 500, BEGAN)
    assert shift.ce_change.still
    assert shift.after > 5 * shift.before
    assert states["p_z_999", "raw"].state == states["sigma_1", "raw"].state == "invisible"
    # A common shift is gone after centering.
    assert {movement.state for movement in drift.movements if movement.coordinate == "centered"} == {"quiet"}
    assert drift.finding.startswith("Drift that CE cannot see: the common shift (p99 |μ|) rose from")
    assert "it began between steps 500 and 1000" in drift.finding
    assert "common shift of all logits" in drift.finding


def test_a_run_without_a_shift_stays_quiet(tmp_path: Path) -> None:
    drift = run_drift(tiny_drift(save_run(tmp_path / "run", (0,) * 6)), tmp_path / "out")
    assert drift.began is None
    assert {movement.state for movement in drift.movements} == {"quiet"}
    assert drift.finding.startswith("No drift that CE cannot see")


def test_finished_checkpoints_are_not_audited_again(
    run: Path, measured: tuple[Drift, Path], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_audits(monkeypatch)
    assert without_time(run_drift(tiny_drift(run), kept)) == without_time(measured[0])
    assert done == []


def test_other_settings_weights_or_steps_or_a_damaged_file_are_measured_anew(
    run: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_audits(monkeypatch)
    places = [run / f"checkpoint-{step}" for step in (100, 200, 500, 1000)]
    damaged, weights, step = (kept / "checkpoints" / place.name / "kept.json" for place in places[:3])
    damaged.write_text("{")
    found = read_record(weights, KeptCheckpoint)
    replace(found, identity=found.identity.replace(found.checkpoint.weights, "0" * 16)).write(weights)
    found = read_record(step, KeptCheckpoint)
    replace(found, checkpoint=replace(found.checkpoint, step=501)).write(step)
    run_drift(tiny_drift(*places), kept)
    assert done == ["checkpoint-100", "checkpoint-200", "checkpoint-500"]
    run_drift(tiny_drift(*places[:2], gradient_blocks=0), kept)
    assert done[3:] == ["checkpoint-100", "checkpoint-200"]


def test_a_killed_measurement_resumes_where_it_stopped(run: Path, tmp_path: Path) -> None:
    places = tuple(run / f"checkpoint-{step}" for step in (500, 1000, 1500))
    with pytest.MonkeyPatch.context() as patch:
        count_audits(patch, fail_at=3)
        with pytest.raises(SystemExit):
            run_drift(tiny_drift(*places), tmp_path)
    assert not (tmp_path / "checkpoints/checkpoint-1500/kept.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        done = count_audits(patch)
        drift = run_drift(tiny_drift(*places), tmp_path)
    assert done == ["checkpoint-1500"]
    assert drift.began == BEGAN


def test_a_checkpoint_with_another_tokenizer_is_refused(
    run: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_audits(monkeypatch)
    other = Path(shutil.copytree(run / "checkpoint-200", tmp_path / "checkpoint-200"))
    save_tokenizer(other, bos=True)
    with pytest.raises(InputError, match="checkpoint-200 tokenizes the text differently from checkpoint-100"):
        run_drift(tiny_drift(run / "checkpoint-100", other), kept)
    assert done == []


def damage(folder: Path, how: str) -> None:
    from transformers import AutoModelForCausalLM

    weights = folder / "model.safetensors"
    if how == "no tokenizer":
        for file in folder.glob("tokenizer*"):
            file.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "missing shard":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    elif how == "no config":
        (folder / "config.json").write_text("{}")
    elif how == "fewer positions":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    elif how == "another vocabulary":
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(520)
        model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no tokenizer", r"checkpoint-9000 has no tokenizer: .* or pass `tokenizer`, a folder or Hugging Face id"),
        ("truncated", r"the weights of .*checkpoint-9000 cannot be loaded: model\.safetensors: "),
        ("pickled", r"checkpoint-9000 has no safetensors weights; .* `allow_pickle`"),
        ("missing shard", r"checkpoint-9000 lacks model-2\.safetensors, which its index"),
        ("no config", "checkpoint-9000 is not a Hugging Face model"),
        ("fewer positions", "checkpoint-9000 tokenizes the text differently"),
        ("another vocabulary", "not from one run: the vocabulary of checkpoint-9000 is 520, but 512 in checkpoint-100"),
    ],
)
def test_the_last_checkpoint_is_checked_before_the_first_is_measured(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, sentence: str
) -> None:
    done = count_audits(monkeypatch)
    last = Path(shutil.copytree(run / "checkpoint-2000", tmp_path / "checkpoint-9000"))
    damage(last, how)
    with pytest.raises(ZlossError, match=sentence):
        run_drift(tiny_drift(run, last, block_size=None), tmp_path / "out")
    assert done == []
    assert not (tmp_path / "out").exists()


def test_one_tokenizer_is_read_for_checkpoints_that_have_none(
    run: Path, measured: tuple[Drift, Path], tmp_path: Path
) -> None:
    bare = Path(shutil.copytree(run, tmp_path / run.name))
    for folder in bare.iterdir():
        damage(folder, "no tokenizer")
    save_tokenizer(tmp_path / "tokenizer")
    drift = run_drift(tiny_drift(bare, tokenizer=str(tmp_path / "tokenizer")), tmp_path / "out")
    assert without_time(drift) == without_time(measured[0])


def test_revisions_of_a_hub_model_are_loaded_by_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, asked = drift_module.load_checkpoint, []

    def from_hub(name: str, *, revision: str, **options: Any) -> Any:
        asked.append((name, revision))
        return load(str(run / revision), **options)

    monkeypatch.setattr(drift_module, "load_checkpoint", from_hub)
    wanted = replace(tiny_drift(), checkpoints=("owner/name",), revisions=("checkpoint-1000", "checkpoint-500"))
    drift = run_drift(wanted, tmp_path)
    # Each is checked before the first is measured.
    assert asked == [("owner/name", "checkpoint-500"), ("owner/name", "checkpoint-1000")] * 2
    assert (drift.model, drift.began) == ("owner/name", BEGAN)


@pytest.mark.parametrize(
    ("kind", "sentence", "changes"),
    [
        (CheckpointError, "is not a checkpoint and contains none", {"checkpoints": ("{folder}",)}),
        (CorpusError, "cannot read the text", {"texts": ("{folder}/no.txt",)}),
        (CorpusError, "tokens, which give", {"texts": ("{folder}/short.txt",)}),
        (InputError, "blocks of 64, but at least 8 blocks", {"blocks": None, "texts": ("{folder}/few.txt",)}),
        (InputError, "`blocks` is expected", {"blocks": 4}),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_audited(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], sentence: str, changes: Any
) -> None:
    """The others: `tests/cli/test_drift.py`."""
    done = count_audits(monkeypatch)
    (tmp_path / "short.txt").write_text("A few words only. " * 20)
    (tmp_path / "few.txt").write_text("A few words only. " * 60)
    changes = {
        key: tuple(text.format(folder=tmp_path) for text in value) if isinstance(value, tuple) else value
        for key, value in changes.items()
    }
    with pytest.raises(kind, match=sentence):
        run_drift(replace(tiny_drift(run), **changes), tmp_path / "out")
    assert done == []
