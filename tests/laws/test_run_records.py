"""Properties of the files of a run, on files that real runs have written.

What is read is written again unchanged. A file that lacks a key, or has a value of another type there, is refused by the name
of that key; a damaged line of steps.jsonl also by its number.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_moe import routed, tiny_moe_config
from tests.train.tiny_run import tiny_config
from zloss.errors import InputError
from zloss.results.provenance import RunProvenance, read_run_provenance
from zloss.results.record import from_plain, to_plain
from zloss.results.run_metrics import RunMetrics, read_metrics
from zloss.train.finished import read_run
from zloss.train.folder import read_steps
from zloss.train.options import RunOptions
from zloss.train.run import run_training
from zloss.train.start import prepare_start

KINDS = ("tied", "experts", "diverged")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied dense run, a run with experts, and one whose every gradient is nonfinite."""
    place = tmp_path_factory.mktemp("records")
    dense = tiny_config(place, method="centered", coef=1e-2, steps=3, warmup=1, adam_every=2, thresholds=(0.5, 10.0))
    experts = replace(tiny_moe_config(place / "experts"), steps=3, warmup=1)
    configs = {
        "tied": dense,
        "experts": routed(experts, "active_route_mean", capacity_factor=1.0),
        "diverged": replace(dense, method="standard", coef=1e38),
    }
    for kind, config in configs.items():
        run_training(config, prepare_start(config), place / kind, options=RunOptions(checkpoint_every=0))
    return {kind: place / kind for kind in configs}


def parsed(folder: Path, name: str = "metrics.json") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return data


def places(data: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all keys, of nested objects too."""
    for key, value in data.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def at(data: dict[str, Any], path: tuple[str, ...]) -> Any:
    """What the file has at `path`."""
    return functools.reduce(operator.getitem, path, data)


def with_change(data: dict[str, Any], path: tuple[str, ...], **value: Any) -> dict[str, Any]:
    """A copy with the key at `path` taken out, or set to `value`."""
    copy = json.loads(json.dumps(data))
    holder = at(copy, path[:-1])
    del holder[path[-1]]
    if value:
        holder[path[-1]] = value["value"]
    return dict(copy)


def other_type(value: Any) -> Any:
    """A value that no field of the type of `value` can hold."""
    return 7 if isinstance(value, (str, dict, list)) else ["neither number nor object"]


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_survive_a_round_trip(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    file = folders[kind] / "metrics.json"
    read_metrics(folders[kind]).write(tmp_path)
    assert (tmp_path / "metrics.json").read_bytes() == file.read_bytes()
    metrics = read_metrics(folders[kind])
    assert (metrics.routing is not None) == (kind == "experts")
    assert read_run(folders[kind]).metrics == parsed(folders[kind])


def test_the_fixture_covers_what_can_be_missing(folders: dict[str, Path]) -> None:
    tied, diverged = read_metrics(folders["tied"]), read_metrics(folders["diverged"])
    assert tied.gradients.tied_paths is not None
    assert set(tied.training.phi) == {"phi_0.5", "phi_10"}
    assert tied.training.adam_samples == 1
    assert diverged.training.grad_norm_max is None
    assert diverged.training.nonfinite_gradient == 1.0
    assert diverged.reasons["r_aux"] == "the value was nan"


OPTIONAL = (
    "heads.",
    "gradient.raw",
    "gradient.centered",
    "gradient.whole_model",
    "tied_paths",
    "diagnostic_tied_paths",
    "router.top_k",
    "router.decisions",
)
"""These, what is below them, and `reasons`: a missing number is read as None, because a run of another version may not have
it."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_key_of_metrics_is_named(folders: dict[str, Path], kind: str) -> None:
    data = parsed(folders[kind])
    refused = 0
    for path in places(data):
        name = ".".join(path)
        open_keys = (
            path[0].startswith("phi_")
            or path[0] == "reasons"
            or (path[0] == "valid_nonfinite" and len(path) > 1)
            # Runs from before the validation was kept block by block still open.
            or (path[0] == "validation_blocks" and path[1:2] not in (("tokens",), ("ce",)))
        )
        if open_keys or (len(path) > 1 and name.startswith(OPTIONAL) and name != "heads.raw"):
            continue
        with pytest.raises(InputError, match=f"`{re.escape(name)}`"):
            RunMetrics.from_dict(with_change(data, path))
        refused += 1
    assert refused > 60


@pytest.mark.parametrize("kind", KINDS)
def test_an_ill_typed_key_of_metrics_is_named(folders: dict[str, Path], kind: str) -> None:
    data = parsed(folders[kind])
    for path in places(data):
        with pytest.raises(InputError, match=re.escape(path[-1])):
            RunMetrics.from_dict(with_change(data, path, value=other_type(at(data, path))))


def test_keys_of_a_newer_version_are_kept(folders: dict[str, Path]) -> None:
    data = parsed(folders["tied"]) | {"ce_per_block": [1.0, 2.0]}
    assert RunMetrics.from_dict(data).to_dict() == data


def test_damaged_metrics_are_named_by_file_and_key(folders: dict[str, Path], tmp_path: Path) -> None:
    for content, named in (
        ("{", "metrics.json cannot be read"),
        ("[]", "metrics.json is expected to hold an object"),
        ("{}", "metrics.json is not readable: `schema`"),
        (json.dumps(parsed(folders["tied"]) | {"schema": "zloss.run/2"}), "'zloss.run/2'"),
        (json.dumps(parsed(folders["tied"]) | {"ppl": "high"}), "metrics.json is not readable: `ppl`"),
    ):
        (tmp_path / "metrics.json").write_text(content)
        with pytest.raises(InputError, match=re.escape(named)):
            read_metrics(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_survive_a_round_trip(folders: dict[str, Path], kind: str) -> None:
    lines = (folders[kind] / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    assert [record.to_json() for record in read_steps(folders[kind])] == lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_step_is_named_by_line_and_key(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    lines = (folders[kind] / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    line = json.loads(lines[1])
    for path in places(line):
        damaged = [with_change(line, path, value=other_type(at(line, path)))]
        if path[0] != "telemetry" or len(path) == 1:  # its keys depend on the model
            damaged.append(with_change(line, path))
        for change in damaged:
            (tmp_path / "steps.jsonl").write_text("\n".join([lines[0], json.dumps(change), lines[2]]))
            with pytest.raises(InputError, match=rf"line 2 of .*steps\.jsonl.*`{re.escape('.'.join(path))}`"):
                read_steps(tmp_path)
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines[:2], lines[2][:40]]))
    with pytest.raises(InputError, match=r"line 3 of .*not JSON"):
        read_steps(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_provenance_survives_a_round_trip_and_names_its_keys(folders: dict[str, Path], kind: str) -> None:
    data = parsed(folders[kind], "provenance.json")
    assert to_plain(read_run_provenance(folders[kind])) == data
    for key, value in data.items():
        with pytest.raises(InputError, match=f"`{key}`"):
            from_plain(RunProvenance, data | {key: other_type(value)})
        if key not in ("transformers", "row_pass"):
            with pytest.raises(InputError, match=f"`{key}`"):
                from_plain(RunProvenance, with_change(data, (key,)))


def test_a_run_without_readable_provenance_is_still_a_run(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("config.json", "metrics.json"):
        (tmp_path / name).write_bytes((folders["tied"] / name).read_bytes())
    assert read_run(tmp_path).provenance is None
    (tmp_path / "provenance.json").write_text("{}")
    assert read_run(tmp_path).provenance is None
    assert read_run(folders["tied"]).provenance is not None
