"""Committed results: their verdicts follow from their rows, their pages from their numbers, and they name no machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zloss.report.document import to_markdown
from zloss.report.reproduction import reproduction_document
from zloss.results.reproduction import ReproductionRecord
from zloss_paper.engine.recipe import find_recipe
from zloss_paper.engine.reproduction import kept_table, rejudge

FOLDER = Path(__file__).parents[3] / "docs/results"
RESULTS = {
    data["label"]: data
    for file in sorted(FOLDER.glob("*.json"))
    if (data := json.loads(file.read_text(encoding="utf-8")))["schema"] == "zloss.reproduction/1"
}


def test_the_guide_links_results_that_exist() -> None:
    guide = (FOLDER.parent / "reproduce.md").read_text(encoding="utf-8")
    linked = re.findall(r"\| `([\w:]+)` \|.*\[page\]\(results/(\w+)\.md\)", guide)
    assert len(linked) >= 7
    for label, stem in linked:
        assert find_recipe(label).stem == stem
        assert RESULTS[label]["profile"] == "cpu"
        assert (FOLDER / f"{stem}.md").is_file()


@pytest.mark.parametrize("label", RESULTS)
def test_a_kept_result_that_is_judged_again_is_the_same_record_and_page(label: str) -> None:
    again = rejudge(FOLDER, find_recipe(label))
    assert json.loads(json.dumps(again.record.to_dict())) == RESULTS[label]
    page = (FOLDER / f"{again.recipe.stem}.md").read_text(encoding="utf-8")
    figures = [Path(found) for found in re.findall(r"^!\[.*\]\((.+)\)$", page, re.MULTILINE)]
    assert to_markdown(reproduction_document(again.record, figures)) == page


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["details"].pop("runs"),
        lambda data: data["details"]["runs"].pop(),
        lambda data: data["rows"].clear(),
    ],
    ids=["no runs", "a run is missing", "no rows"],
)
def test_without_the_numbers_of_every_run_a_table_has_its_means(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """Ended in a KeyError or a division by zero, or gave the runs of one line to another."""
    recipe, data = find_recipe("tab:stress_diag"), json.loads(json.dumps(RESULTS["tab:stress_diag"]))
    assert any(line.by_seed for line in kept_table(recipe, ReproductionRecord.from_dict(data)))
    change(data)
    assert not any(line.by_seed for line in kept_table(recipe, ReproductionRecord.from_dict(data)))
    (tmp_path / f"{recipe.stem}.json").write_text(json.dumps(data))
    assert len(rejudge(tmp_path, recipe).record.claims) == len(data["claims"])


def test_a_column_that_a_kept_result_lacks_was_not_measured() -> None:
    recipe, data = find_recipe("tab:stress_diag"), json.loads(json.dumps(RESULTS["tab:stress_diag"]))
    data["columns"].remove("clip_rate")
    for row in data["rows"]:
        del row["clip_rate"]
    lines = kept_table(recipe, ReproductionRecord.from_dict(data))
    assert {line.reasons["clip_rate"] for line in lines} == {"not measured in this run"}


@pytest.mark.parametrize("label", RESULTS)
def test_a_result_says_where_its_text_comes_from(label: str) -> None:
    data = RESULTS[label]
    assert data["texts"]
    for text in data["texts"]:
        assert re.fullmatch("[0-9a-f]{64}", text["sha256"])
        assert text["source"].startswith("https://")
        assert text["licence"]
    content = (FOLDER / f"{find_recipe(label).stem}.json").read_text() + (
        FOLDER / f"{find_recipe(label).stem}.md"
    ).read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/])/(?:home|root|tmp|work|mnt|Users)/", content)
    assert data["provenance"]["command"] in content
