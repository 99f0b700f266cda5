"""The committed full set: every stage of the decision map and every item of the checklist is evaluated from its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zloss.cli.main import COMMANDS
from zloss.decide.answer import DecidedResults, decide_records
from zloss.decide.stages import STAGES
from zloss.results.decision import DecisionMaps
from zloss.results.files import load_results, read_record
from zloss_paper.reporting.checklist import ITEMS, checklist, read_results

ROOT = Path(__file__).parents[3]
FULL_SET = ROOT / "docs/results/full_set"
FILES = "audit/report.json implementation/implementation_audit.json loss/report.json router_scale.json"
RESULTS = [FULL_SET / name for name in (*FILES.split(), "dense/comparison.json", "moe/comparison.json")]


@pytest.fixture(scope="module")
def decided() -> DecidedResults:
    return decide_records(one.record for one in load_results(RESULTS))


def test_all_eight_stages_are_evaluated_from_the_results_that_they_are_for(decided: DecidedResults) -> None:
    (only,) = decided.maps
    assert [decision.stage for decision in only.decisions] == [stage.name for stage in STAGES]
    assert {decision.stage: decision.fired for decision in only.decisions if decision.fired is None} == {}
    written = read_record(FULL_SET / "decisions.json", DecisionMaps)
    assert [d.fired for d in written.maps[0].decisions] == [d.fired for d in only.decisions]
    reasons = {decision.stage: decision.reason for decision in only.decisions}
    assert "stored in bf16" in reasons["Implementation"]
    assert "Δ_θ" in reasons["Implementation"]
    assert "κ" in reasons["Optimizer consequence"]
    assert "s_rel" in reasons["Router reduction"]


def test_both_comparisons_keep_their_own_baselines(decided: DecidedResults) -> None:
    bases = [comparison.baseline_method for comparison in decided.comparisons]
    known = {base.mean("ppl") for base in bases if base is not None}
    assert len(known) == 2
    gate = decided.maps[0].decisions[-1]
    assert {effect.before for effect in gate.measured if effect.quantity == "PPL"} <= known


def test_every_item_of_the_checklist_is_covered() -> None:
    found = checklist(read_results([str(path) for path in RESULTS]))
    assert len(found) == len(ITEMS)
    assert {id: where for id, (status, where) in found.items() if status != "covered"} == {}
    # Without the implementation audit, or the runs with experts, items are missing: the set has nothing to spare.
    for left_out in ("implementation", "moe"):
        fewer = [str(path) for path in RESULTS if left_out not in path.parts]
        assert any(status != "covered" for status, _ in checklist(read_results(fewer)).values())


def test_the_page_shows_the_commands_of_the_script() -> None:
    script = (ROOT / "tools/full_set.sh").read_text(encoding="utf-8")
    page = (ROOT / "docs/results/full_set.md").read_text(encoding="utf-8")
    used = re.findall(r"^\$zloss ([\w-]+)", script, flags=re.MULTILINE)
    assert set(used) <= set(COMMANDS)
    assert re.findall(r"^zloss ([\w-]+)", page, flags=re.MULTILINE) == used
    assert all(item.name in page for item in STAGES)
