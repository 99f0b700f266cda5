"""What joined results say: the next command, the models behind them, one decision map for each audit."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.laws.example_results import ROUTERS, implementation_example
from tests.measured_reports import weighed
from zloss.cli.main import main
from zloss.decide.answer import ORDER, DecidedResults, decide_results, next_command
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.stages import STAGES
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport, Nonfinite
from zloss.results.comparison import Comparison
from zloss.results.loss_audit import LossAudit
from zloss.results.router import MeasuredScale

GIVEN: dict[str, Any] = {
    "model": "my model", "texts": ("a.txt", "b.txt"), "argv": ("audit", "my model", "--block-size", "24"),
}  # fmt: skip
TEXT = ["--text", "a.txt", "--text", "b.txt"]
MEASURED = MeasuredScale(1e-3, 0.0, (2e-3,), 2.0, 2.0, (2.0,), None, 1e-6)


RECOMMEND = ["recommend", "my model", *TEXT, "--out", "zloss-recommend"]
AUDIT = ["audit", "my model", "--block-size", "24"]
SHIFTED, GAIN = {"noise": (0.24, 0.02)}, {"gain": 0.2}
BF16, UNREAD, PARTIAL = {"dtype": "bf16"}, {"nonfinite": Nonfinite(nan=3)}, {"status": "partial"}
LOSS = ["audit-loss", "MODULE:FUNCTION"]


@pytest.mark.parametrize(
    ("measured", "changes", "given", "wanted"),
    [
        ({**SHIFTED, **GAIN}, {}, {"valid_vocab": 100},
         ["center", "my model", *TEXT, "--valid-vocab", "100", "--out", "zloss-centered"]),
        ({"noise": (0.06, 0.06)}, {}, {}, RECOMMEND),
        (GAIN, {}, {"tokenizer": "other"}, [*RECOMMEND[:-2], "--tokenizer", "other", *RECOMMEND[-2:]]),
        (GAIN, {}, {}, RECOMMEND),  # the block size was chosen for the audit alone
        (GAIN, {}, {"argv": ()}, [*RECOMMEND[:-2], "--block-size", "128", *RECOMMEND[-2:]]),
        ({"input_path": 0.5}, {}, {}, LOSS),
        ({"tokens": 512}, {}, {}, [*AUDIT, "--blocks", "64"]),
        ({}, {}, {}, LOSS),
        # An incomplete audit is completed first.
        (SHIFTED, PARTIAL, {}, [*AUDIT, "--resume"]),
        (SHIFTED, PARTIAL, {"argv": (*AUDIT, "--resume")}, [*AUDIT, "--resume"]),
        (SHIFTED, PARTIAL, {"argv": ()}, ["audit", "my model", *TEXT, "--resume"]),
        (GAIN, UNREAD, BF16, [*AUDIT, "--dtype", "fp32"]),
        # fp64 has more range than fp32: the same audit in fp32 would tell nothing.
        (GAIN, UNREAD, {"dtype": "fp64"}, RECOMMEND),
    ],
)  # fmt: skip
def test_the_next_command_follows_from_the_verdict(
    bare: AuditReport, measured: dict[str, Any], changes: dict[str, Any], given: dict[str, Any], wanted: list[str]
) -> None:
    short = weighed(replace(bare, corpus=replace(bare.corpus, block_size=128), **changes), **measured)
    command, why = next_command(with_decisions(short), **GIVEN | given)
    assert shlex.split(command) == ["zloss", *wanted]
    assert not why.endswith(".")


def test_a_text_is_only_too_short_by_the_limit_of_its_report(bare: AuditReport) -> None:
    short = with_decisions(weighed(bare, tokens=512, gain=0.2), thresholds=Thresholds(least_tokens=100, gain_share=0.1))
    assert "recommend" in next_command(short, **GIVEN)[0]
    left_out = replace(bare, gradient=None, tied_paths=None)
    unknown = with_decisions(replace(weighed(left_out, tokens=512, input_path=None), logit_noise=None),
                             thresholds=Thresholds(least_tokens=100, shift_over_log_v=0))  # fmt: skip
    assert unknown.verdict is not None
    assert unknown.verdict.action == "not_enough_evidence"
    assert "--blocks" not in next_command(unknown, **GIVEN)[0]


def test_missing_gradients_are_measured_and_a_router_loss_that_is_off_is_matched(bare: AuditReport) -> None:
    experts = weighed(replace(bare, router=replace(ROUTERS, applied=MEASURED)))
    for tied, end in ((True, ["--gradient-blocks", "8"]), (False, LOSS)):
        left_out = replace(bare, gradient=None, tied_paths=None, model=replace(bare.model, tied=tied))
        report = with_decisions(weighed(left_out, input_path=None))
        assert shlex.split(next_command(report, **GIVEN)[0])[-2:] == end
    wanted = ["router-scale", "--coef", "0.001", "--from", "token_layer_mean", "--layers", "1", "--top-k", "2"]
    assert shlex.split(next_command(with_decisions(experts), **GIVEN)[0]) == ["zloss", *wanted]


def test_results_of_different_models_were_joined_without_a_word(
    report: AuditReport, comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = implementation_example(replace(report, model=replace(report.model, name="gpt2")))
    wanted = (
        f"The joined results are of different models: the audit is of {report.model.name}, the implementation audit is of "
        f"{audit.model.name}, the comparison is of smollm2."
    )
    report.write(tmp_path / "report.json")
    audit.write(tmp_path / "implementation_audit.json")
    replace(comparison, model="smollm2").write(tmp_path / "comparison.json")
    names = [str(tmp_path / f"{name}.json") for name in ("report", "implementation_audit", "comparison")]
    assert main(["report", *names, "--out", str(tmp_path / "out")]) == 0
    assert wanted in " ".join(capsys.readouterr().out.split())
    assert wanted in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (only,) = json.loads((tmp_path / "out" / "decisions.json").read_text(encoding="utf-8"))["maps"]
    assert only["models"] == wanted
    # Also without an audit.
    assert main(["report", *names[1:], "--out", str(tmp_path / "two")]) == 0
    said = f"the implementation audit is of {audit.model.name}, the comparison is of smollm2."
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "two" / "report.html").read_text(encoding="utf-8")


def test_results_of_one_model_need_no_sentence(report: AuditReport, other: AuditReport, comparison: Comparison) -> None:
    same = replace(comparison, model=report.model.name)
    assert [one.models for one in decide_results((report,), (), (same, comparison)).maps] == [None]
    first, second = decide_results((report, other), (), (same,)).maps
    assert first.models is None
    assert second.models is not None


def test_every_audit_has_its_own_map_and_without_one_there_is_one(
    report: AuditReport, other: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    maps = decide_results((report, other), (loss_audit,), (comparison,)).maps
    assert [one.audit for one in maps] == ["tiny-tied", "tiny <other>"]
    for audit, one in zip((report, other), maps, strict=True):
        assert one.decisions == decide(audit, loss_audits=[loss_audit], comparisons=[comparison])
        assert one.thresholds == Thresholds().to_dict()
    assert set(ORDER) == {stage.name for stage in STAGES}
    with pytest.raises(InputError, match="call `decide_results`"):
        DecidedResults(audits=(replace(report, decisions=()),))
    chosen = Thresholds(grad_tail_ratio=1e9)
    (only,) = decide_results(comparisons=(comparison,), thresholds=chosen).maps
    assert (only.audit, only.thresholds) == (None, chosen.to_dict())
    assert only.decisions == decide(None, comparisons=[comparison], thresholds=chosen)
    assert only.verdict is not None
    assert only.bottom_line == only.verdict.sentence
