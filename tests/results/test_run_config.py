"""config.json of a run: every field comes back, and a value that no run can have is refused by its key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from zloss.errors import InputError
from zloss.results.io import read_object
from zloss.results.record import from_plain
from zloss.results.run_config import MoeRun, RunConfig, RunData, TextPart, TrainConfig, without_paths

FILES = [{"name": "text.txt", "bytes": 3, "sha256": "0" * 64}]
DATA = RunData(
    TextPart("text.txt", 10, 0, 240, "aa", {"files": FILES}), TextPart("text.txt", 2, 10, 48, "bb", {"files": FILES})
)
DENSE = RunConfig(TrainConfig(method="standard", coef=1e-3, texts=("text.txt",), blocks=10), DATA, "0123")
EXPERTS = RunConfig(
    TrainConfig(model="moe", moe=MoeRun(router="active_route_sum:matched", router_coef=0.1)), DATA, "seed"
)


@pytest.mark.parametrize("record", [DENSE, EXPERTS])
def test_what_is_written_is_read(record: RunConfig, tmp_path: Path) -> None:
    data = read_object(record.write(tmp_path / "config.json"), advice="")
    assert RunConfig.from_dict(data) == record
    others = {"schema", "data", "initial_weights"}
    # Written only if set: an optimizer state to resume from, another tokenizer, a step at which λ is switched off.
    unset = {"optimizer_state", "tokenizer", "coef_until", *(["moe"] if record is DENSE else [])}
    assert set(data) == ({field.name for field in fields(TrainConfig)} | others) - unset
    assert data["data"]["train"]["files"] == FILES


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr": "fast"}, "`lr` is expected to be a number"),
        ({"lr": -1.0}, "`lr` is expected to be a finite number > 0"),
        ({"lr_floor": -0.1}, "`lr_floor` is expected to be a finite number ≥ 0"),
        ({"beta1": 1.0}, "`beta1` is expected to be a number from 0 to below 1"),
        ({"beta2": -0.5}, "`beta2` is expected to be a number from 0 to below 1"),
        ({"spike": -1.0}, "`spike` is expected to be a finite number ≥ 0"),
        ({"thresholds": [10.0, -1.0]}, "`thresholds` are expected to be finite numbers ≥ 0"),
        ({"valid_offset": -1}, "`valid_offset` is expected to be a whole number ≥ 0"),
        ({"steps": 1.5}, "`steps` is expected to be a whole number"),
        ({"bos": "perhaps"}, "`bos`"),
        ({"lr": None}, "`lr`"),
        ({"moe": {**EXPERTS.to_dict()["moe"], "width": "wide"}}, "`moe.width` is expected to be a whole number"),
        ({"moe": []}, "`moe` is expected to be an object"),
    ],
)
def test_another_value_is_refused_by_its_key(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        from_plain(TrainConfig, {**DENSE.to_dict(), **changes})


def test_paths_are_named_by_their_last_part(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = str(tmp_path / "model")
    config = TrainConfig(model=model, tokenizer=model, texts=(str(tmp_path / "a.txt"),), valid_texts=("dir/b.txt",))
    found = without_paths(config)
    assert (found.model, found.tokenizer, found.texts, found.valid_texts) == ("model", "model", ("a.txt",), ("b.txt",))
    assert without_paths(TrainConfig(model="owner/name")).model == "owner/name"
    experts = TrainConfig(model="moe", moe=MoeRun(tokenizer=str(tmp_path / "model")))
    named = without_paths(experts).moe
    assert named is not None
    assert named.tokenizer == "model"
