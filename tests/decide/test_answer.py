"""What joined results say: the next command, the models behind them, one decision map for each audit."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.laws.example_results import ROUTERS, implementation_example
from zloss.cli.main import main
from zloss.decide.answer import ORDER, AuditedInput, DecidedResults, decide_results, next_command
from zloss.decide.decision_map import decide
from zloss.decide.recommend import candidates
from zloss.decide.stages import STAGES
from zloss.decide.thresholds import Thresholds
from zloss.errors import InputError
from zloss.results.audit import AuditReport, Nonfinite
from zloss.results.comparison import Comparison
from zloss.results.decision import LambdaBudget
from zloss.results.files import write_record
from zloss.results.loss_audit import LossAudit

GIVEN = AuditedInput(model="my model", texts=("a.txt", "b.txt"), argv=("audit", "my model", "--block-size", "24"))
TEXT = ["--text", "a.txt", "--text", "b.txt"]


def with_fired(report: AuditReport, *fired: str, **changes: Any) -> AuditReport:
    """The report with exactly these stages fired; the stages of training are not evaluated."""
    decisions = tuple(
        replace(
            decision, fired=decision.stage in fired if decision.fired is not None or decision.stage in fired else None
        )
        for decision in report.decisions
    )
    return replace(report, decisions=decisions, **changes)


def words(report: AuditReport, given: AuditedInput = GIVEN) -> list[str]:
    return shlex.split(next_command(report, given).line)


def test_a_common_shift_is_centered(report: AuditReport) -> None:
    found = words(with_fired(report, "Source coordinate", "Architectural transport"), replace(GIVEN, valid_vocab=100))
    assert found == ["zloss", "center", "my model", *TEXT, "--valid-vocab", "100", "--out", "zloss-centered"]


@pytest.mark.parametrize(
    ("stage", "method"),
    [
        ("Objective decomposition", "factorized"),
        ("Architectural transport", "gain-aware"),
        ("Shared pathway", "standard"),
    ],
)
def test_other_stages_of_the_checkpoint_are_trained(report: AuditReport, stage: str, method: str) -> None:
    """One command runs the method of the stage, at the λ of the budget, beside the others that the audit proposes."""
    fired = with_fired(report, stage, lambda_budget=LambdaBudget(0.05, raw=2.34e-4))
    assert words(fired) == ["zloss", "recommend", "my model", *TEXT, "--out", "zloss-recommend"]
    assert (method, 2e-4) in [arm.key for arm in candidates(fired)]


def test_a_model_with_few_positions_is_trained_on_blocks_that_fit(report: AuditReport) -> None:
    fired = with_fired(report, "Shared pathway", corpus=replace(report.corpus, block_size=128))
    assert "--block-size" not in words(fired)  # chosen by the user for the audit alone
    found = words(fired, replace(GIVEN, argv=("audit", "my model")))
    assert found == ["zloss", "recommend", "my model", *TEXT, "--block-size", "128", "--out", "zloss-recommend"]


@pytest.mark.parametrize("raw", [None, 0.5])
def test_a_budget_above_the_usual_range_is_not_run(report: AuditReport, raw: float | None) -> None:
    (first, *_) = candidates(with_fired(report, "Shared pathway", lambda_budget=LambdaBudget(0.05, raw=raw)))
    assert first.coef == (1e-4 if raw is None else 1e-3)


def test_a_router_scale_comes_before_the_head(report: AuditReport) -> None:
    found = words(with_fired(report, "Source coordinate", "Router reduction", router=ROUTERS))
    assert found[:2] == ["zloss", "router-scale"]
    assert found[found.index("--top-k") + 1] == "2"
    assert found[found.index("--from") + 1] == "token_layer_mean"


def test_without_a_fired_stage_the_loss_is_audited(report: AuditReport) -> None:
    assert next_command(with_fired(report), GIVEN).line == "zloss audit-loss MODULE:FUNCTION"


def test_an_incomplete_audit_is_completed_first(report: AuditReport) -> None:
    partial = with_fired(report, "Source coordinate", status="partial")
    assert words(partial) == ["zloss", "audit", "my model", "--block-size", "24", "--resume"]
    again = replace(GIVEN, argv=(*GIVEN.argv, "--resume"))
    assert words(partial, again) == ["zloss", "audit", "my model", "--block-size", "24", "--resume"]
    assert words(partial, replace(GIVEN, argv=())) == ["zloss", "audit", "my model", *TEXT, "--resume"]
    broken = with_fired(report, "Source coordinate", nonfinite=Nonfinite(nan=3))
    assert words(broken, replace(GIVEN, dtype="bf16"))[-2:] == ["--dtype", "fp32"]
    assert words(broken)[1] == "center"
    # fp64 has more range than fp32: the same audit in fp32 would tell nothing.
    assert words(broken, replace(GIVEN, dtype="fp64"))[1] == "center"


def test_missing_gradients_of_a_tied_head_are_measured_where_nothing_fired(report: AuditReport) -> None:
    decisions = tuple(
        replace(
            decision, fired=None if decision.stage == "Shared pathway" else False if decision.fired else decision.fired
        )
        for decision in report.decisions
    )
    bare = replace(report, decisions=decisions, gradient=None, model=replace(report.model, tied=True))
    assert words(bare)[-2:] == ["--gradient-blocks", "8"]
    assert words(replace(bare, model=replace(report.model, tied=False)))[1] == "audit-loss"


def test_every_stage_gives_a_command(report: AuditReport) -> None:
    assert set(ORDER) == {stage.name for stage in STAGES}
    for stage in STAGES:
        command = next_command(with_fired(report, stage.name, router=ROUTERS), GIVEN)
        assert command.line.startswith("zloss ")
        assert not command.why.endswith(".")


def test_results_of_different_models_were_joined_without_a_word(
    report: AuditReport, comparison: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = implementation_example(replace(report, model=replace(report.model, name="gpt2")))
    wanted = (
        f"The joined results are of different models: the audit is of {report.model.name}, the implementation audit is of "
        f"{audit.model.name}, the comparison is of smollm2."
    )
    write_record(tmp_path / "report.json", report)
    write_record(tmp_path / "implementation_audit.json", audit)
    write_record(tmp_path / "comparison.json", replace(comparison, model="smollm2"))
    names = [str(tmp_path / f"{name}.json") for name in ("report", "implementation_audit", "comparison")]
    assert main(["report", *names, "--out", str(tmp_path / "out")]) == 0
    assert wanted in " ".join(capsys.readouterr().out.split())
    assert wanted in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    (only,) = json.loads((tmp_path / "out" / "decisions.json").read_text(encoding="utf-8"))["maps"]
    assert only["models"] == wanted
    # Also without an audit, and beside several.
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


def test_every_audit_has_its_own_map(
    report: AuditReport, other: AuditReport, loss_audit: LossAudit, comparison: Comparison
) -> None:
    results = decide_results((report, other), (loss_audit,), (comparison,))
    assert results.shared is None
    assert [one.audit for one in results.maps] == ["tiny-tied", "tiny <other>"]
    for audit, one in zip((report, other), results.maps, strict=True):
        assert one.decisions == decide(audit, loss_audits=[loss_audit], comparisons=[comparison])
        assert one.thresholds == Thresholds().to_dict()


def test_without_an_audit_there_is_one_map(comparison: Comparison) -> None:
    chosen = Thresholds(grad_tail_ratio=1e9)
    (only,) = decide_results(comparisons=(comparison,), thresholds=chosen).maps
    assert only.audit is None
    assert only.thresholds == chosen.to_dict()
    assert only.decisions == decide(None, comparisons=[comparison], thresholds=chosen)


def test_an_undecided_audit_is_refused(bare: AuditReport) -> None:
    with pytest.raises(InputError, match="call `decide_results`"):
        DecidedResults(audits=(bare,))
