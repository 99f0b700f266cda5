"""report.json: the contract's keys, round trips, nulls with reasons."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from zloss.results.audit import NO_INPUT_PATH, AuditReport, HeadNumbers, Heads

HEAD_KEYS = {
    *("diag_z", "p_z_999", "a_p_mean", "a_p_99", "log_z_mean", "mu_abs_99", "delta_u_99", "row_max_999"),
    *("sigma_1", "e_1", "e_16", "f_16", "rho_16"),
}
DECISION_KEYS = {
    *("stage", "risk", "trigger", "value", "threshold", "fired", "reason"),
    *("action", "expected", "not_guaranteed", "evidence"),
}


def test_every_key_of_the_contract_is_there(report: AuditReport) -> None:
    data = report.to_dict()
    assert data["schema"] == "zloss.audit/1"
    assert {"name", "vocab", "width", "tied"} <= set(data["model"])
    assert {"name", "blocks", "block_size", "predictions", "bos"} <= set(data["corpus"])
    for coordinate in ("raw", "centered"):
        assert set(data["heads"][coordinate]) >= HEAD_KEYS
        assert set(data["tied_paths"][coordinate]) == {"output_norm", "input_norm", "cosine"}
    gradient = data["gradient"]
    assert gradient["scope"] == "output_head"
    assert gradient["reduction"] == "mean"
    assert {"coef", "blocks", "raw", "centered", "whole_model"} <= set(gradient)
    assert len(data["decisions"]) == 8
    assert all(set(decision) >= DECISION_KEYS for decision in data["decisions"])
    assert {"zloss", "torch", "transformers", "command", "seed", "started", "seconds"} <= set(data["provenance"])
    assert data["status"] == "complete"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_number_becomes_null_with_its_reason(bare: AuditReport, value: float) -> None:
    broken = replace(bare, heads=Heads(replace(bare.heads.raw, p_z_999=value), bare.heads.centered), ppl=value)
    data = broken.to_dict()
    assert data["heads"]["raw"]["p_z_999"] is None
    assert str(value) in data["reasons"]["heads.raw.p_z_999"]
    assert str(value) in data["reasons"]["ppl"]
    json.dumps(data, allow_nan=False)


def test_every_null_number_has_a_reason_its_own_or_a_parents(bare: AuditReport) -> None:
    capped = replace(
        bare, heads=Heads(bare.heads.raw, HeadNumbers()), reasons={"heads.centered": "softcap"}, gradient=None
    )
    again = AuditReport.from_dict(capped.to_dict())
    assert again.reason("heads.centered.p_z_999") == "softcap"
    assert "heads.centered.p_z_999" not in again.reasons
    assert again.reason("gradient") == "not measured in this run"
    assert again.reason("heads.raw.p_z_999") is None


def test_an_untied_head_says_that_it_has_no_input_path(bare: AuditReport) -> None:
    untied = replace(bare, model=replace(bare.model, tied=False), tied_paths=None)
    data = untied.to_dict()
    assert data["tied_paths"] is None
    assert data["reasons"]["tied_paths"] == NO_INPUT_PATH
