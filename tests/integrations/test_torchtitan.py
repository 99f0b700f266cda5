"""torchtitan's Trainer with `zloss.integrations.torchtitan`, on CPU processes with gloo (`torchtitan_cases.py`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.forked import Forked, forked_ranks
from tests.integrations.framework_table import check_and_record

INSTALLED = importlib.util.find_spec("torchtitan") is not None


def job() -> None:
    """All cases; torchtitan is imported here alone, because it takes seconds and the stand-ins would reach other tests."""
    # torchtitan takes CUDA where it finds no device, and reads its memory statistics.
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch.cpu.get_device_name = lambda device=None: "CPU"  # type: ignore[attr-defined]
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**30)  # type: ignore[attr-defined]
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.cpu.memory_stats = lambda device=None: {}  # type: ignore[attr-defined]
    from tests.integrations import torchtitan_cases as cases

    ranks = {name: case.ranks for name, case in cases.CASES.items()} | dict.fromkeys(cases.OTHERS, 2)
    found = {name: forked_ranks(number, partial(cases.on_rank, name)) for name, number in ranks.items()}
    print(json.dumps({name: json.loads(output.splitlines()[-1]) for name, output in found.items()}))


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    if not INSTALLED:
        pytest.skip("torchtitan is not installed; `python -m tools.frameworks torchtitan` installs and tests it")
    ended = Forked(job).wait()
    assert ended.code == 0, ended.error[-3000:]
    found: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def runs(answers: dict[str, Any]) -> dict[str, Any]:
    """Training runs of four steps, by case."""
    found = {name: answer for name, answer in answers.items() if "validation" in answer}
    assert len(found) == 21
    return found


def test_parameters_after_four_steps_equal_the_reference(runs: dict[str, Any]) -> None:
    """Relative to how far the parameters moved. In bf16 the Trainer rounds weights and activations."""
    for name, run in runs.items():
        if "bf16" in name:
            assert run["error"] <= 0.05 < 0.2 <= run["without_z"], name
        else:
            check_and_record(f"{name}: parameters after 4 steps", run["error"], run["without_z"])


def test_the_trainer_reports_ce_plus_z_and_validates_with_ce(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        tolerance = 1e-3 if "bf16" in name else 1e-6
        assert run["loss"] <= tolerance, name
        assert run["validation"] <= tolerance, name
        assert run["validation_of_loss"] >= 100 * tolerance, name


def test_scalars_count_the_tokens_of_all_ranks_once(runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        tolerance = 1e-3 if "bf16" in name else 1e-6
        wrong = {scalar: error for scalar, error in (run["scalars"] or {}).items() if not error <= tolerance}
        assert not wrong, (name, wrong)
    with_scalars = [run["scalars"] for run in runs.values() if run["scalars"]]
    assert len(with_scalars) == 17
    assert sum("tokens" in scalars for scalars in with_scalars) == 16


def test_metrics_of_a_closed_trainer_receive_nothing(runs: dict[str, Any]) -> None:
    assert not any(run["reports"] for run in runs.values())


def test_gradients_of_plain_shards_and_of_dtensors_without_fsdp2(answers: dict[str, Any]) -> None:
    assert len(answers["gradients"]) == 5
    for name, found in answers["gradients"].items():
        check_and_record(name, **found)


def test_the_commands_of_the_page_build_what_it_says(answers: dict[str, Any]) -> None:
    assert answers["page"] == {
        coef: [
            f"FusedZLoss.Config(num_chunks=8, loss_fn=ZLoss.Config(coef={coef}, target=0.0, objective='standard'))",
            "ZLossMetrics.Config",
            True,
        ]
        for coef in ("0.0001", "1e-05")
    }


def test_refusals_say_what_to_do(answers: dict[str, Any]) -> None:
    errors = answers["refusals"]
    assert errors["no target"].endswith("`target` must be given: 0.0 (the convention of most code) or null (log V).")
    assert "`coef` must be given" in errors["no coefficient"]
    assert "unknown setting of z_loss: 'objectiv'. Did you mean 'objective'?" in errors["unknown setting"]
    assert "`fused` is expected to be true or false, but got 'no'" in errors["fused is not a bool"]
    assert "It is a Z-loss already: set --loss.loss_fn.coef instead." in errors["a Z-loss already"]
    assert "objective 'ce' has no coefficient, but got coef=0.1" in errors["CE with a coefficient"]
    assert "'centered-head' has no coefficient" in errors["a centered head with a coefficient"]
    assert errors["CE without one"] == "nothing"
    assert errors["metrics without a Z-loss"].startswith("InputError: ")
    assert "the loss of this run is not a ZLoss: no Z-loss is trained" in errors["metrics without a Z-loss"]
    assert "this loss is MSELoss.Config" in errors["another loss"]
    assert "Did you mean 'centered'?" in errors["unknown objective"]
    assert "but got -1.0" in errors["negative coefficient"]
    assert errors["head with another forward"].startswith("UnsupportedModelError: ")
    assert "but got Scaled and ZLoss: use ChunkedLossWrapper" in errors["head with another forward"]
    assert "and CrossEntropyLoss: use ChunkedLossWrapper" in errors["cross-entropy in the fused loss"]
    assert errors["gain without a head"].startswith("MissingInputError: ")
    assert "needs `lm_head`: use FusedZLoss.Config" in errors["gain without a head"]
    assert 'or drop "fused": false' in errors["gain without a head"]
    assert errors["plain head"] == "nothing"


def test_a_missing_hook_is_one_sentence() -> None:
    """Without torchtitan, or with one that lacks `ChunkedLossWrapper`."""
    known = importlib.metadata.version

    def with_version(old: str | None) -> None:
        sys.modules.pop("zloss.integrations.torchtitan", None)
        sys.modules["torchtitan.components.loss"] = types.ModuleType("torchtitan.components.loss")
        importlib.metadata.version = lambda name: old if name == "torchtitan" and old else known(name)
        importlib.import_module("zloss.integrations.torchtitan")

    for old, expected in (
        (None, "'torchtitan>=0.3', which is not installed"),
        ("0.2.1", "≥ 0.3, but torchtitan 0.2.1 is"),
    ):
        if old is None and INSTALLED:
            continue
        ended = Forked(lambda old=old: with_version(old)).wait()
        assert expected in ended.error.splitlines()[-1], ended.error
