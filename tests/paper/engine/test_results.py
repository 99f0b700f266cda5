"""Committed results: their verdicts follow from their rows, their pages from their numbers, and they name no machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from zloss_paper.engine.registry import find_recipe
from zloss_paper.engine.table import Line, Table, cells_of

FOLDER = Path(__file__).parents[3] / "docs/results"
RESULTS = {
    data["label"]: data
    for file in sorted(FOLDER.glob("*.json"))
    if (data := json.loads(file.read_text(encoding="utf-8"))).get("schema") == "zloss.reproduction/1"
}
BESIDE_THE_KEY = {"reasons", "deviations", "beside", "ratio"}


def table_of(data: dict[str, Any]) -> Table:
    numbers = set(data["columns"])
    return Table(
        tuple(
            Line(
                {name: value for name, value in line.items() if name not in numbers | BESIDE_THE_KEY},
                cells_of({name: line.get(name) for name in data["columns"]}),
                line["reasons"],
                tuple(line["deviations"]),
            )
            for line in data["rows"]
        )
    )


def test_the_guide_links_results_that_exist() -> None:
    guide = (FOLDER.parent / "reproduce.md").read_text(encoding="utf-8")
    linked = re.findall(r"\| `([\w:]+)` \|.*\[page\]\(results/(\w+)\.md\)", guide)
    assert len(linked) >= 7
    for label, stem in linked:
        assert find_recipe(label).stem == stem
        assert RESULTS[label]["profile"] == "cpu"
        assert (FOLDER / f"{stem}.md").is_file()


@pytest.mark.parametrize("label", RESULTS)
def test_verdicts_follow_from_the_rows(label: str) -> None:
    data = RESULTS[label]
    stored = {claim["id"]: claim["verdict"] for claim in data["claims"]}
    table = table_of(data)
    assert stored == {claim.id: claim.check(table).verdict for claim in find_recipe(label).claims}


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


@pytest.mark.parametrize("label", RESULTS)
def test_the_page_shows_the_verdicts(label: str) -> None:
    page = (FOLDER / f"{find_recipe(label).stem}.md").read_text(encoding="utf-8")
    for claim in RESULTS[label]["claims"]:
        assert f"| **{claim['verdict']}** |" in page
    assert page.count("**holds**") == sum(claim["verdict"] == "holds" for claim in RESULTS[label]["claims"])
