"""Records of single kinds: keys of the contract, nulls with reasons, keys that are written only if set, files by schema."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.laws.example_results import DOCUMENTED, VARIANT, example_results
from zloss.decide.answer import decide_records
from zloss.errors import InputError
from zloss.results.audit import NO_INPUT_PATH, AuditReport, HeadNumbers, Heads
from zloss.results.comparison import Comparison, RouterVariants, Verdict
from zloss.results.files import load_results, read_record
from zloss.results.loss_audit import LossAudit
from zloss.results.provenance import recorded_command
from zloss.results.record import to_plain

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
    assert (gradient["scope"], gradient["reduction"]) == ("output_head", "mean")
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
        bare,
        heads=Heads(bare.heads.raw, HeadNumbers()),
        reasons={"heads.centered": "softcap"},
        gradient=None,
        model=replace(bare.model, tied=False),
        tied_paths=None,
    )
    again = AuditReport.from_dict(capped.to_dict())
    assert again.reason("heads.centered.p_z_999") == "softcap"
    assert "heads.centered.p_z_999" not in again.reasons
    assert again.reason("gradient") == "not measured in this run"
    assert again.reason("heads.raw.p_z_999") is None
    assert again.reason("tied_paths") == NO_INPUT_PATH


def test_keys_without_a_value_are_left_out_of_a_comparison() -> None:
    dense = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)
    assert "router" not in dense.to_dict()
    routed = replace(dense, router=RouterVariants("none", (VARIANT,)))
    assert list(routed.to_dict())[7:10] == ["quality", "router", "tokens"]
    assert Comparison.from_dict(routed.to_dict()) == routed
    lonely = Verdict("standard", 0.3, delta_ppl=None, accepted=None, reason="no seed in common")
    assert list(to_plain(lonely)) == ["method", "coef", "delta_ppl", "accepted", "reason"]
    # A pair whose PPL is not finite has all keys, with nulls.
    judged = Verdict("standard", 0.3, delta_ppl=None, coordinate="raw", accepted=False)
    pair = ["delta_ppl_std", "within_tolerance", "coordinate", "delta_diagnosed", "improves"]
    assert list(to_plain(judged)) == ["method", "coef", "delta_ppl", *pair, "accepted", "reason"]


def test_the_baseline_is_found_by_name_and_coefficient() -> None:
    comparison = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)
    assert comparison.baseline_method is comparison.methods[0]
    standard = next(method for method in comparison.methods if method.method == "standard")
    methods = (replace(standard, coef=0.5), standard)
    both = replace(comparison, methods=methods, baseline="standard", baseline_coef=standard.coef)
    assert both.baseline_method is standard
    assert replace(comparison, baseline="factorized").baseline_method is None


@dataclass(frozen=True)
class Settings:
    size: int | str | None = "auto"


def test_a_record_that_is_only_written_may_have_any_types() -> None:
    """A reader supports one type besides null; the settings of a recipe may have several."""
    assert to_plain(Settings()) == {"size": "auto"}


def test_kinds_are_distinguished_and_other_json_is_skipped(
    report: AuditReport, loss_audit: LossAudit, comparison: Comparison, tmp_path: Path
) -> None:
    for name, record in (("report", report), ("loss", loss_audit), ("comparison", comparison)):
        record.write(tmp_path / f"{name}.json")
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "decisions.json").write_text('{"schema": "zloss.decisions/1"}')
    results = load_results([tmp_path])
    kinds = {result.path.name: result.kind for result in results}
    assert kinds == {"report.json": "audit", "loss.json": "loss-audit", "comparison.json": "comparison"}
    decided = decide_records(result.record for result in results)
    assert decided.audits[0].heads == report.heads
    assert decided.loss_audits == (loss_audit,)
    assert [one.methods for one in decided.comparisons] == [comparison.methods]
    with pytest.raises(
        InputError, match=r"comparison\.json is not a readable audit: `schema` is expected to be 'zloss.audit/1'"
    ):
        read_record(tmp_path / "comparison.json", AuditReport)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"schema": "zloss.audit/9"}',
            "schema 'zloss.audit/9', but this version reads zloss.audit/1: run the command that wrote it again.",
        ),
        (
            '{"schema": "zloss.loss-audit/1"}',
            "but this version reads zloss.loss-audit/2: run the command that wrote it",
        ),
        ('{"schema": "other/1"}', "is not a zloss result"),
        ("[1, 2]", "is not a zloss result"),
        ('{"schema": "zloss.audit/1", "model": 3}', "not a readable audit: `model` is expected to be an object"),
        ('{"schema": "zloss.comparison/1", "baseline": "ce"}', "not a readable comparison: `seeds` is missing"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    """What is not JSON: `tests/results/test_io.py`."""
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(InputError, match=rf"report\.json .*{message}"):
        load_results([tmp_path / "report.json"])


def test_no_result_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    for paths, message in (
        ([], "no result was given"),
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path], "contains no"),
    ):
        with pytest.raises(InputError, match=message):
            load_results(paths)


@pytest.mark.parametrize(
    "kind", ["audit", "comparison", "drift", "implementation-audit", "recommendation", "reproduction"]
)
def test_keys_of_a_newer_version_survive(kind: str) -> None:
    record = example_results()[f"zloss.{kind}/1"]
    data = record.to_dict() | {"newer": [1, {"a": None}]}
    if kind in ("audit", "comparison"):
        data["provenance"] |= {"gpu": {"name": "none"}}
    assert type(record).from_dict(data).to_dict() == data


def test_recorded_commands_say_nothing_of_the_folders_of_a_machine(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "some text.txt", tmp_path / "not" / "there"
    model.mkdir()
    text.write_text("words")
    got = recorded_command(["audit", str(model), "--text", str(text), "--out", str(out), "--coef", "1e-3"])
    assert got == "zloss audit ./model --text 'some text.txt' --out there --coef 1e-3"
    joined = recorded_command(["audit", f"--text={text}", f"--out={out}", "--coef=1e-3"])  # these had the whole paths
    assert joined == "zloss audit '--text=some text.txt' --out=there --coef=1e-3"
    named = ["audit", "EleutherAI/pythia-70m", "--blocks", "4"]
    assert recorded_command(named) == f"zloss {' '.join(named)}"
