"""Every training recipe at the smoke profile, once: its lines are means over the runs, and its runs are shared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.paper.claim_tables import DESCRIBED, TABLES, TRAINING, verdict, verdicts
from zloss.results.reproduction import NOT_JUDGED
from zloss_paper.engine.claims import FAILS, OPEN
from zloss_paper.engine.inputs import METHODS
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.reproduction import Reproduction, rejudge, reproduce, write_reproduction
from zloss_paper.engine.table import Table
from zloss_paper.engine.workbench import Workbench

Straight = Callable[[list[dict[str, Any]], list[dict[str, Any]]], float]


@dataclass(frozen=True)
class Smoke:
    folder: Path
    results: dict[str, Reproduction]
    trained: int


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    folder = tmp_path_factory.mktemp("smoke")
    bench = Workbench(folder)
    results = {label: reproduce(find_recipe(label), "smoke", Overrides(), bench) for label in TRAINING}
    return Smoke(folder, results, bench.runs_trained)


def test_tables_share_their_runs_and_a_second_call_trains_nothing(smoke: Smoke) -> None:
    """42 arms of eight settings at two seeds, and one start; without sharing it would be more than twice as many."""
    runs = [path.name for path in (smoke.folder / "runs").iterdir()]
    assert len(runs) == len(set(runs)) == 84
    assert len(list((smoke.folder / "models").iterdir())) == 1
    assert smoke.trained == 85
    asked = [run["run"] for label in (*TABLES, *DESCRIBED) for run in smoke.results[label].record.details["runs"]]
    assert set(asked) == set(runs)
    assert len(asked) > 1.7 * len(runs)
    again = Workbench(smoke.folder)
    for label in TRAINING:
        lines = reproduce(find_recipe(label), "smoke", Overrides(), again).record.to_dict()["rows"]
        assert lines == smoke.results[label].record.to_dict()["rows"]
    assert again.runs_trained == 0


def metrics_of(smoke: Smoke, label: str, method: str, coef: float) -> list[dict[str, Any]]:
    """metrics.json of the runs of one line, found by what their own config says."""
    setting = smoke.results[label].config.train
    found = []
    for folder in sorted((smoke.folder / "runs").iterdir()):
        config = json.loads((folder / "config.json").read_text())
        same = all(config[name] == getattr(setting, name) for name in ("lr", "clip", "head_shift", "blocks"))
        if same and (config["method"], config["coef"]) == (METHODS[method], coef):
            found.append(json.loads((folder / "metrics.json").read_text()))
    assert [one["seed"] for one in sorted(found, key=lambda one: one["seed"])] == [1, 2]
    return sorted(found, key=lambda one: int(one["seed"]))


def mean(read: Callable[[dict[str, Any]], float]) -> Straight:
    return lambda own, ce: statistics.fmean(read(one) for one in own)


STRAIGHT: dict[str, Straight] = {
    **{name: mean(lambda m, name=name: m[name]) for name in ("ppl", "grad_norm_max", "phi_10", "clip_rate")},
    **{name: mean(lambda m, name=name: m["heads"][m["coordinate"]][name]) for name in ("p_z_999", "a_p_99", "diag_z")},
    "d_inf_p99": mean(lambda m: m["adam_d_inf_p99"]),
    "ppl_std": lambda own, ce: statistics.stdev(m["ppl"] for m in own),
    "delta_ppl": lambda own, ce: ((own[0]["ppl"] - ce[0]["ppl"]) + (own[1]["ppl"] - ce[1]["ppl"])) / 2,
    "v_max_ratio_to_ce": lambda own, ce: statistics.fmean(
        m["adam_v_max"] / b["adam_v_max"] for m, b in zip(own, ce, strict=True)
    ),
}


@pytest.mark.parametrize("label", TABLES)
def test_lines_are_those_of_the_metrics(smoke: Smoke, label: str) -> None:
    result = smoke.results[label]
    arms = result.config.arms
    assert len(result.table) == len(arms)
    checked = set()
    for arm, line in zip(arms, result.table, strict=True):
        own, ce = metrics_of(smoke, label, arm.method, arm.coef), metrics_of(smoke, label, "CE baseline", 0.0)
        for column in set(result.recipe.columns) & set(STRAIGHT):
            assert line.cells[column].value == pytest.approx(STRAIGHT[column](own, ce), rel=1e-12, abs=1e-15)
            checked.add(column)
    assert {"ppl", "p_z_999", "a_p_99"} <= checked


def test_tied_runs_keep_the_split_of_their_auxiliary_gradient(smoke: Smoke) -> None:
    """It was measured, and lost on the way into the table."""
    result = smoke.results["tab:gpt2_diag"]
    names = {"output_path_norm": "output_norm", "input_path_norm": "input_norm", "input_output_cosine": "cosine"}
    for method in ("Standard Z-loss", "Centered Z-loss"):
        (line,) = result.table.find(method=method)
        paths = [one["tied_paths"] for one in metrics_of(smoke, "tab:gpt2_diag", method, 1e-4)]
        for column, key in names.items():
            assert line.cells[column].value == pytest.approx(statistics.fmean(path[key] for path in paths), rel=1e-12)
        assert [one["tied_paths"] for one in result.record.details["runs"] if one["method"] == METHODS[method]] == paths
    (ce,) = result.table.find(method="CE baseline")
    assert "no auxiliary gradient" in ce.reasons["output_path_norm"]


def test_lines_hold_the_numbers_of_each_run(smoke: Smoke) -> None:
    (line,) = smoke.results["tab:medium_long"].table.find(method="Centered Z-loss")
    own = metrics_of(smoke, "tab:medium_long", "Centered Z-loss", 1e-4)
    assert line.by_seed["ppl"] == tuple(one["ppl"] for one in own)
    assert line.by_seed["nonfinite_microbatch"] == (0.0, 0.0)


def test_pages_tell_the_story_and_no_path_and_are_the_same_when_judged_again(smoke: Smoke, tmp_path: Path) -> None:
    for label in TRAINING:
        result = smoke.results[label]
        written = write_reproduction(tmp_path, result)
        page, data = written[1].read_text(encoding="utf-8"), json.loads(written[0].read_text(encoding="utf-8"))
        assert "not comparable" in page
        assert "**holds**" not in page
        assert {(claim["verdict"], claim["evidence"]) for claim in data["claims"]} == {(OPEN, NOT_JUDGED)}
        assert not any(str(smoke.folder) in path.read_text(encoding="utf-8") for path in written)
        drawn = [path for path in written if path.suffix == ".svg"]
        assert len(drawn) == (label in ("tab:stress_diag", "tab:fineweb_noclip_stress", "tab:fineweb_update_outlier"))
        again = rejudge(tmp_path, result.recipe)
        for claim in result.recipe.claims:
            assert claim.judge(again.table) == claim.judge(result.table), (label, claim.id)
        assert again.record.to_dict() == result.record.to_dict()
        assert write_reproduction(tmp_path, again) == written
        assert written[1].read_text(encoding="utf-8") == page


def test_a_short_run_has_a_maximum_and_no_p99(smoke: Smoke) -> None:
    for line in smoke.results["tab:fineweb_noclip_stress"].table:
        assert "grad_norm_p99" not in line.cells
        assert "4 steps" in line.reasons["grad_norm_p99"]
        assert line.cells["grad_norm_max"].value > 0
    assert verdicts(smoke.results["tab:fineweb_noclip_stress"])["raw_gradient_tails"] == OPEN


def test_the_shift_is_the_requested_probe(smoke: Smoke) -> None:
    for label, size in (("tab:finetune", 250), ("tab:pythia_ft", 700)):
        runs = smoke.results[label].record.details["runs"]
        found = [run["heads"]["raw"]["mu_abs_99"] for run in runs if run["method"] == "ce"]
        assert found == pytest.approx([size, size], rel=0.1)
        assert any(f"about {size}" in deviation for deviation in smoke.results[label].table.lines[0].deviations)
    tied = smoke.results["tab:gpt2_diag"]
    assert not any("shifted" in deviation for deviation in tied.table.lines[0].deviations)
    assert all(run["heads"]["raw"]["mu_abs_99"] < 50 for run in tied.record.details["runs"])


def test_paired_differences_are_those_of_the_tables(smoke: Smoke) -> None:
    paired = smoke.results["text:paired_differences"]
    (line,) = paired.table.find(run="GPT-2 FineWeb-Edu (tab:fineweb_ft)", method="Centered Z-loss")
    own = metrics_of(smoke, "tab:fineweb_ft", "Centered Z-loss", 1e-4)
    ce = metrics_of(smoke, "tab:fineweb_ft", "CE baseline", 0.0)
    gains = [m["heads"]["centered"]["a_p_99"] - b["heads"]["raw"]["a_p_99"] for m, b in zip(own, ce, strict=True)]
    assert line.cells["delta_a_p_99"].value == pytest.approx(statistics.fmean(gains), rel=1e-12)
    assert len(paired.table) == 8
    assert all(paired.recipe.beside(one) is not None for one in paired.table)


def test_every_line_is_next_to_the_papers(smoke: Smoke) -> None:
    for label in TABLES:
        result = smoke.results[label]
        assert [result.recipe.beside(line) is not None for line in result.table] == [True] * len(result.table), label
        assert not result.record.comparable
    sweep = smoke.results["text:raw_sweep_1e3"]
    assert [line.key["lambda_aux"] for line in sweep.table if sweep.recipe.beside(line) is None] == [1e-3] * 3


def test_a_claim_about_the_papers_numbers_stays_open(smoke: Smoke) -> None:
    quoted = [found["quoted"] for result in smoke.results.values() if "quoted" in (found := verdicts(result))]
    assert quoted == [OPEN] * 9
    # The same numbers at the paper's own setting would be judged.
    lines = tuple(replace(line, deviations=()) for line in smoke.results["tab:finetune"].table)
    assert verdict("tab:finetune", "quoted", Table(lines)) == FAILS
