"""The reporting checklist: what an audit covers, what is missing, what does not apply."""

from __future__ import annotations

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


def status(**results: Any) -> dict[str, str]:
    """The status of every item for results by kind."""
    given = [Given(f"{kind}.json", kind.replace("_", "-"), data) for kind, data in results.items()]
    return {id: covered for id, (covered, _) in checklist(given).items()}


METRICS = {"clip_rate": 0.0, "grad_norm_p99": 2.0, "adam_v_max": 1e-3}
OTHERS = {
    "comparison": {"methods": [{"method": "standard", "coef": 1e-4, "metrics": METRICS}], "quality": {}},
    "loss_audit": {"identified": {"coef": 1e-4, "coordinate": "raw"}, "source": {"delta_src": 0.1, "cosine": None}},
}
ROUTER = {"coef": 1e-3, "convention": "megatron", "top_k": 2, "load_cv": None}
APPLIED = {**ROUTER, "applied": {"coef": 1e-3, "relative": 0.5, "absolute_per_layer": [1e-6]}}
COMPARED = {"comparison": {"router": {"conventions": [], "top_k": 2, "decisions": 512}, "methods": []}}


@pytest.mark.parametrize(
    ("model", "changes", "others", "covered", "not_covered", "outside"),
    [
        pytest.param("tied", {}, {}, "lambda_diag target tied p_z_999 r_z tied_paths",
                     "lambda_aux clip_rate source_error adam_v", "top_k", id="the checkpoint side"),
        pytest.param("untied", {}, {}, "", "", "tied_paths", id="an untied head has no paths"),
        pytest.param("tied", {"gradient": None}, {}, "p_z_999", "r_z", "", id="null is not covered"),
        pytest.param("tied", {}, OTHERS, "clip_rate grad_norm adam_v lambda_aux source_error auxiliary_coordinate",
                     "source_cosine", "", id="other results fill what an audit cannot"),
        # The coefficient and convention that an audit diagnoses with are its own defaults.
        pytest.param("tied", {"router": ROUTER}, {}, "top_k",
                     "load_cv capacity lambda_r reduction absolute relative", "", id="defaults of an audit"),
        pytest.param("tied", {"router": APPLIED}, {}, "lambda_r absolute relative", "", "", id="a measured router loss"),
        pytest.param("tied", {}, COMPARED, "top_k denominator", "", "", id="a comparison of router losses"),
    ],
)  # fmt: skip
def test_what_an_audit_and_other_results_cover(
    audits: dict[str, dict[str, Any]], model: str, changes: dict[str, Any], others: dict[str, Any], covered: str,
    not_covered: str, outside: str,
) -> None:  # fmt: skip
    found = status(audit={**audits[model], **changes}, **others)
    expected = {"covered": covered, "not covered": not_covered, "does not apply": outside}
    for wanted, names in expected.items():
        assert {name: found[name] for name in names.split()} == dict.fromkeys(names.split(), wanted)


def test_a_run_with_experts_covers_its_router_loss() -> None:
    run = {"dropped_routes": 0.0, "over_capacity": 0.1, "s_rel": 1.0, "router_absolute": 1e-6, "entropy": 1.6,
           "load_cv": 0.3, "router_correction_norm": 1e-3, "router": {"coef": 1e-3, "convention": "megatron"}}  # fmt: skip
    router = {item.id for item in ITEMS if item.scope == "router"}
    found = status(metrics=run)
    assert {name for name in router if found[name] != "covered"} == {"top_k", "denominator"}
    found = status(metrics={**run, "router": {"coef": 1e-3, "convention": "megatron", "top_k": 2, "decisions": 512}})
    assert {found[name] for name in router} == {"covered"}


def test_an_implementation_audit_covers_the_backward_source(report: AuditReport) -> None:
    audit = implementation_example(report)
    found = status(implementation_audit=audit.to_dict())
    covered = "forward_error total_error source_error source_cosine total_cosine corpus_logits update_error fp16_margin"
    assert {item.id for item in ITEMS if found[item.id] == "covered"} == set(covered.split())
    # A section that was not measured covers nothing.
    bare = replace(audit, updates=(), overflow=(), implementations=())
    found = status(implementation_audit=bare.to_dict())
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
    assert checklist(given)["clip_rate"][0] == "covered"
    with pytest.raises(InputError, match="does not exist"):
        read_results([str(tmp_path / "nothing")])
