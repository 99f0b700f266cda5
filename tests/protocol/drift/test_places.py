"""Which folders and revisions are checkpoints, and their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from zloss.errors import CheckpointError, InputError
from zloss.protocol.drift.config import DriftConfig
from zloss.protocol.drift.places import find_places, run_name, step_of


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
        (InputError, "two of step 5", DriftConfig(checkpoints=(str(one), str(same)))),
        (InputError, "'final' has no number", DriftConfig(checkpoints=(str(one), str(nameless)))),
        (CheckpointError, "has no weights", DriftConfig(checkpoints=(str(one), str(empty)))),
        (InputError, "is a folder", DriftConfig(checkpoints=(str(one),), revisions=("step1", "step2"))),
        (InputError, "names 2", DriftConfig(checkpoints=("a/b", "a/c"), revisions=("step1", "step2"))),
    ]
    for kind, sentence, config in cases:
        with pytest.raises(kind, match=sentence):
            find_places(config)
