"""The committed comparison: its page has the tables of its numbers, and its verdicts follow from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zloss.report.tables.comparison_markdown import comparison_markdown
from zloss.results.comparison import Comparison

FOLDER = Path(__file__).parents[3] / "docs/results"
DATA = json.loads((FOLDER / "matched_smollm2.json").read_text(encoding="utf-8"))
PAGE = (FOLDER / "matched_smollm2.md").read_text(encoding="utf-8")


def test_the_page_holds_the_rendered_tables() -> None:
    assert comparison_markdown(Comparison.from_dict(DATA)).partition("\n")[2].strip() in PAGE
    assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|mnt|Users)/", json.dumps(DATA) + PAGE)


def test_four_methods_and_two_seeds_in_two_hours() -> None:
    assert {method["method"] for method in DATA["methods"]} == {"ce", "centered-head", "standard", "centered"}
    assert all(method["seeds"] == [1, 2] for method in DATA["methods"])
    assert DATA["provenance"]["seconds"] <= 2 * 3600


def test_verdicts_follow_from_the_differences() -> None:
    gate = DATA["quality"]
    paired = {method["method"]: method["paired"] for method in DATA["methods"]}
    for record in gate["methods"]:
        found = paired[record["method"]]
        assert record["delta_ppl"] == pytest.approx(found["deployed"]["ppl"]["mean"])
        if record["accepted"] is not None:
            tail = found["same_coordinate"][record["coordinate"]][gate["diagnosed"]]["mean"]
            assert record["accepted"] == (tail < 0 and record["delta_ppl"] <= gate["tolerance_ppl"])
