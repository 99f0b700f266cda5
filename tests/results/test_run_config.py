"""config.json of a run: every field comes back, and a value that no run can have is refused by its key."""

from __future__ import annotations

import json
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
# As an older version wrote it: a key that is added later must have a default and be written only if it is set.
WRITTEN_BEFORE = """
{"model": "moe", "from_config": null, "train_tokenizer": 300, "untie": false, "head_shift": 0.0, "method": "ce", "coef": 0.0,
 "target": null, "gain_beta": 0.01, "seed": 1, "texts": ["text.txt"], "corpus": null, "text_field": "text", "blocks": null,
 "offset": 0, "valid_texts": [], "valid_blocks": 6, "valid_offset": null, "block_size": 24, "bos": "auto", "steps": 8,
 "warmup": 0, "lr": 0.003, "lr_floor": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1,
 "decay": "matrices", "clip": 1.0, "micro_batch": 2, "accumulate": 1, "precision": "fp32", "head": "fused", "adam_every": 4,
 "thresholds": [10.0, 50.0, 100.0], "spike": 0.5, "diag_coef": 0.0001, "gradient_blocks": 8,
 "moe": {"top_k": 2, "experts": 4, "layers": 2, "width": 32, "heads": 4, "expert_width": 16, "tokenizer": null,
  "load_balance": 0.01, "router": "active_route_sum:matched", "router_coef": 0.1, "router_target": null,
  "capacity_factor": 1.5},
 "schema": "zloss.train-config/1",
 "data": {"train": {"name": "text.txt", "blocks": 1201, "offset": 0, "tokens": 28824, "fingerprint": "42d01fd8e09ea45c",
   "files": [{"name": "text.txt", "bytes": 40827, "sha256": "6964a894"}]},
  "valid": {"name": "text.txt", "blocks": 6, "offset": 1201, "tokens": 144, "fingerprint": "226ac0fd0a689302",
   "files": [{"name": "text.txt", "bytes": 40827, "sha256": "6964a894"}]}},
 "initial_weights": "seed"}
"""


@pytest.mark.parametrize("record", [DENSE, EXPERTS])
def test_what_is_written_is_read(record: RunConfig, tmp_path: Path) -> None:
    data = read_object(record.write(tmp_path / "config.json"), advice="")
    assert RunConfig.from_dict(data) == record
    others = {"schema", "data", "initial_weights"}
    # Written only if set: an optimizer state to resume from, another tokenizer, a step at which λ is switched off.
    unset = {"optimizer_state", "tokenizer", "coef_until", *(["moe"] if record is DENSE else [])}
    assert set(data) == ({field.name for field in fields(TrainConfig)} | others) - unset
    assert data["data"]["train"]["files"] == FILES


def test_files_of_an_older_version_open_and_are_written_alike() -> None:
    before = json.loads(WRITTEN_BEFORE)
    record = RunConfig.from_dict(before)
    assert (record.config.lr, record.config.moe and record.config.moe.width) == (3e-3, 32)
    assert record.to_dict() == before


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
