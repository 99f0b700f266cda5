"""The committed comparison: its page has the tables of its numbers, and its verdicts follow from them."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from zloss.report.comparison import comparison_page
from zloss.report.document import to_markdown
from zloss.results.comparison import Comparison

FOLDER = Path(__file__).parents[2] / "docs/results"
DATA = json.loads((FOLDER / "matched_smollm2.json").read_text(encoding="utf-8"))
PAGE = (FOLDER / "matched_smollm2.md").read_text(encoding="utf-8")


def test_the_page_holds_the_rendered_tables() -> None:
    assert to_markdown(comparison_page(Comparison.from_dict(DATA))).partition("\n")[2].strip() in PAGE
    assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|mnt|Users)/", json.dumps(DATA) + PAGE)


def test_one_run_and_one_minute_are_singular() -> None:
    """It said "4 runs in 1 minutes"."""
    comparison = Comparison.from_dict(DATA)
    assert comparison.provenance is not None

    def made(runs: int, seconds: float) -> str:
        provenance = replace(comparison.provenance, runs=runs, seconds=seconds)
        return to_markdown(comparison_page(replace(comparison, provenance=provenance)))

    assert "4 runs in 1 minute, training" in made(4, 62.0)
    assert "1 run in 2 minutes, training" in made(1, 118.0)


def test_numbers_next_to_a_verdict_at_another_target_say_which_c_they_use() -> None:
    """Runs with c = 0 that lowered |log Z| stood next to a P_Z that rose."""
    said, data = "verdicts at another c say so", json.loads(json.dumps(DATA))
    assert said not in to_markdown(comparison_page(Comparison.from_dict(data)))
    data["quality"]["methods"][0]["parts"]["coordinate"]["numbers"]["target"] = 0.0
    assert said in to_markdown(comparison_page(Comparison.from_dict(data)))


def test_verdicts_follow_from_the_differences() -> None:
    gate = DATA["quality"]
    paired = {method["method"]: method["paired"] for method in DATA["methods"]}
    assert all(method["seeds"] == [1, 2] for method in DATA["methods"])
    for record in gate["methods"]:
        assert record["parts"]["coordinate"]["state"] == "holds"
        assert record["delta_ppl"] == pytest.approx(paired[record["method"]]["deployed"]["ppl"]["mean"])
        quality = record["parts"]["quality"]
        gaps = paired[record["method"]]["deployed"]["ce"]["by_seed"]
        # Two seeds: the one-sided 95 % quantile of Student's t with one degree of freedom is 6.314.
        half = 6.3138 * statistics.stdev(gaps) / math.sqrt(2)
        lower, upper = statistics.fmean(gaps) - half, statistics.fmean(gaps) + half
        assert quality["interval"]["upper"] >= upper - 1e-6
        tolerance = quality["numbers"]["tolerance_ce"]
        assert (quality["state"] == "fails") == (quality["interval"]["lower"] > tolerance)
        assert lower > tolerance or quality["state"] != "fails"
    verdicts = {record["method"]: record["verdict"] for record in gate["methods"]}
    assert verdicts["standard"] == "rejected"
    assert verdicts["centered"] == "inconclusive"
