"""The reporting checklist: what an audit covers, what is missing, what does not apply."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.laws.example_results import implementation_example
from zloss.cli.main import COMMANDS
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.workbench import Workbench
from zloss_paper.reporting.checklist import ITEMS, Given, checklist, read_results


@pytest.fixture(scope="module")
def audits(gpt2_folder: Path, neox_folder: Path) -> dict[str, dict[str, Any]]:
    bench, found = Workbench(), {}
    for name, folder in (("tied", gpt2_folder), ("untied", neox_folder)):
        config = find_recipe("text:reporting").configure("smoke", Overrides(models=(str(folder),)))
        found[name] = bench.audit(config.audits.rows[0].audit).to_dict()
    return found


def status(*given: Given) -> dict[str, str]:
    return {id: covered for id, (covered, _) in checklist(given).items()}


def test_an_audit_covers_the_checkpoint_side(audits: dict[str, dict[str, Any]]) -> None:
    found = status(Given("report.json", "audit", audits["tied"]))
    assert {found[name] for name in ("lambda_diag", "target", "tied", "p_z_999", "r_z", "tied_paths")} == {"covered"}
    assert {found[name] for name in ("lambda_aux", "clip_rate", "source_error", "adam_v")} == {"not covered"}
    assert found["top_k"] == "does not apply"
    assert status(Given("report.json", "audit", audits["untied"]))["tied_paths"] == "does not apply"
    # A number that is null is not covered.
    data = copy.deepcopy(audits["tied"])
    data["gradient"] = data["heads"]["raw"]["a_p_99"] = None
    found = status(Given("report.json", "audit", data))
    assert (found["r_z"], found["a_p_99"], found["p_z_999"]) == ("not covered", "not covered", "covered")


def test_other_results_fill_what_an_audit_cannot(audits: dict[str, dict[str, Any]]) -> None:
    metrics = {"clip_rate": 0.0, "grad_norm_p99": 2.0, "adam_v_max": 1e-3}
    comparison = {"methods": [{"method": "standard", "coef": 1e-4, "metrics": metrics}], "quality": {}}
    loss = {"identified": {"coef": 1e-4, "coordinate": "raw"}, "source": {"delta_src": 0.1, "cosine": None}}
    found = status(
        Given("report.json", "audit", audits["tied"]),
        Given("comparison.json", "comparison", comparison),
        Given("loss.json", "loss-audit", loss),
    )
    for name in ("clip_rate", "grad_norm", "adam_v", "lambda_aux", "source_error", "auxiliary_coordinate"):
        assert found[name] == "covered", name
    assert found["source_cosine"] == "not covered"


def test_a_router_section_makes_the_router_items_apply(audits: dict[str, dict[str, Any]]) -> None:
    data = {**audits["tied"], "router": {"coef": 1e-3, "convention": "megatron", "top_k": 2, "load_cv": None}}
    found = status(Given("report.json", "audit", data))
    assert found["top_k"] == "covered"
    assert found["load_cv"] == found["capacity"] == "not covered"
    # The coefficient and convention that an audit diagnoses with are its own defaults.
    assert found["lambda_r"] == found["reduction"] == found["absolute"] == found["relative"] == "not covered"
    applied = {"coef": 1e-3, "relative": 0.5, "absolute_per_layer": [1e-6]}
    measured = {**data, "router": {**data["router"], "applied": applied}}
    found = status(Given("report.json", "audit", measured))
    assert found["lambda_r"] == found["absolute"] == found["relative"] == "covered"


def test_a_run_with_experts_covers_its_router_loss(audits: dict[str, dict[str, Any]]) -> None:
    run = {"dropped_routes": 0.0, "over_capacity": 0.1, "s_rel": 1.0, "router_absolute": 1e-6, "entropy": 1.6,
           "load_cv": 0.3, "router_correction_norm": 1e-3, "router": {"coef": 1e-3, "convention": "megatron"}}  # fmt: skip
    found = status(Given("metrics.json", "metrics", run))
    router = {item.id for item in ITEMS if item.scope == "router"}
    assert {name for name in router if found[name] != "covered"} == {"top_k", "denominator"}
    stated = {**run, "router": {"coef": 1e-3, "convention": "megatron", "top_k": 2, "decisions": 512}}
    found = status(Given("metrics.json", "metrics", stated))
    assert {found[name] for name in router} == {"covered"}
    compared = {"router": {"conventions": [], "top_k": 2, "decisions": 512}, "methods": []}
    found = status(Given("comparison.json", "comparison", compared))
    assert found["top_k"] == found["denominator"] == "covered"


def test_an_implementation_audit_covers_the_backward_source(report: AuditReport) -> None:
    audit = implementation_example(report)
    found = status(Given("implementation_audit.json", "implementation-audit", audit.to_dict()))
    covered = "forward_error total_error source_error source_cosine total_cosine corpus_logits update_error fp16_margin"
    assert {item.id for item in ITEMS if found[item.id] == "covered"} == set(covered.split())
    # A section that was not measured covers nothing.
    bare = replace(audit, updates=(), overflow=(), implementations=())
    found = status(Given("implementation_audit.json", "implementation-audit", bare.to_dict()))
    assert {found[name] for name in ("update_error", "fp16_margin", "total_cosine")} == {"not covered"}
    assert found["corpus_logits"] == "covered"


def test_every_item_can_be_covered_by_a_command_that_exists() -> None:
    assert len({item.id for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        assert item.places, item.id
        assert item.command.split()[1] in COMMANDS


def test_results_are_read_from_disk(audits: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(audits["tied"]))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.json").write_text(json.dumps({"clip_rate": 0.5}))
    given = read_results([str(tmp_path), str(run / "metrics.json")])
    assert [result.kind for result in given] == ["audit", "metrics"]
    assert status(*given)["clip_rate"] == "covered"
    with pytest.raises(InputError, match="no file or folder"):
        read_results([str(tmp_path / "nothing")])
