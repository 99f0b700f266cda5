"""The mixture-of-experts recipes: small runs through the command's own path, and claims that notice wrong numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.tiny_run import some_text
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.profile import Overrides
from zloss_paper.engine.registry import find_recipe
from zloss_paper.engine.reproduction import Reproduction, reproduce
from zloss_paper.engine.reproduction_files import write_reproduction
from zloss_paper.engine.table import Cell, Line, Table
from zloss_paper.engine.workbench import Workbench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("moe-recipe")
    (place / "text.txt").write_text(some_text(), encoding="utf-8")
    return place


def smoke(folder: Path, label: str) -> Reproduction:
    overrides = Overrides(texts=(str(folder / "text.txt"),), text_source="CPython, PSF-2.0")
    return reproduce(find_recipe(label), "smoke", overrides, Workbench(folder / "out"))


def verdicts(result: Reproduction) -> dict[str, str]:
    """Every claim on the measured lines; a smoke result itself judges none."""
    return {claim.id: claim.check(result.table).verdict for claim in result.recipe.claims}


def test_a_small_table_is_trained_judged_and_drawn(folder: Path) -> None:
    result = smoke(folder, "tab:moe")
    assert len(result.table) == 6 + 6 * 2
    found = verdicts(result)
    assert found["relative_scales"] == found["matched_recovery"] == found["similar_ce"] == HOLDS
    assert set(found) == {
        "relative_scales",
        "matched_recovery",
        "mean_lowers_entropy",
        "sum_raises_entropy",
        "similar_ce",
    }
    (mean,) = result.table.find(router_loss="active-route sum", seed="mean")
    single = result.table.find(router_loss="active-route sum")[1:]
    assert mean.cells["entropy"].value == pytest.approx(sum(line.cells["entropy"].value for line in single) / 2)
    beside = result.beside(mean)
    assert beside is not None
    assert beside.cells["entropy"].value == 1.756
    assert result.beside(single[0]) is None
    paths = write_reproduction(folder / "page", result)
    assert {path.name for path in paths} == {"tab_moe.json", "tab_moe.md", "moe_top4.svg"}
    written = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert str(folder) not in written
    # A second call trains nothing: same numbers, same figure.
    again = smoke(folder, "tab:moe")
    assert again.to_dict()["rows"] == result.to_dict()["rows"]
    assert again.notes == result.notes


def test_top_2_has_the_papers_scales(folder: Path) -> None:
    result = smoke(folder, "text:moe_top2")
    assert verdicts(result)["relative_scales"] == HOLDS
    scales = {line.key["convention"]: line.cells["s_rel"].value for line in result.table.find(seed="mean")}
    assert (scales["active-route mean"], scales["active-route sum"]) == (0.5, 2.0)
    paper = find_recipe("text:moe_top2").paper
    assert paper is not None
    assert {judged.claim.id: judged.paper.verdict for judged in result.claims if judged.paper}[
        "relative_scales"
    ] == HOLDS
    for line in paper.table:
        assert scales[line.key["convention"]] == line.cells["s_rel"].value


def test_paper_scale_is_the_papers(folder: Path) -> None:
    for label, top_k, steps in (("tab:moe", 4, 1200), ("text:moe_top2", 2, 800)):
        grid = find_recipe(label).configure("paper", Overrides()).grid
        moe = grid.base.moe
        assert (moe.top_k, moe.layers, moe.width, moe.heads, moe.experts) == (top_k, 4, 256, 4, 8)
        assert (moe.load_balance, grid.router_coefs, grid.base.steps, len(grid.seeds)) == (1e-2, (1e-3,), steps, 3)
        assert grid.base.corpus == "wikitext-103"


def test_a_model_that_is_not_used_is_said(folder: Path) -> None:
    config = find_recipe("tab:moe").configure("smoke", Overrides(models=("gpt2",)))
    assert "left aside" in config.notes[0]
    assert not find_recipe("tab:moe").configure("smoke", Overrides()).notes


def changed(column: str, factor: float, **key: str) -> Table:
    """The paper's table with one column of some rows multiplied."""
    paper = find_recipe("tab:moe").paper
    assert paper is not None

    def change(line: Line) -> Line:
        if any(line.key.get(name) != value for name, value in key.items()):
            return line
        old = line.cells[column]
        return replace(line, cells={**line.cells, column: Cell(old.value * factor, old.half_unit)})

    return Table(tuple(change(line) for line in paper.table))


@pytest.mark.parametrize(
    ("claim", "column", "factor", "variant"),
    [
        ("relative_scales", "s_rel", 2.0, "active-route mean"),
        ("matched_recovery", "entropy", 1.01, "active-route sum matched"),
        ("matched_recovery", "ce", 1.0002, "active-route mean matched"),
        ("mean_lowers_entropy", "entropy", 1.02, "active-route mean"),
        ("sum_raises_entropy", "entropy", 0.95, "active-route sum"),
        ("similar_ce", "ce", 1.01, "none"),
    ],
)
def test_a_changed_number_is_noticed(claim: str, column: str, factor: float, variant: str) -> None:
    (found,) = (one for one in find_recipe("tab:moe").claims if one.id == claim)
    assert found.check(changed(column, 1.0)).verdict == HOLDS
    assert found.check(changed(column, factor, router_loss=variant)).verdict == FAILS


def test_losses_that_drift_apart_are_no_recovery() -> None:
    table = changed("ce", 1.0)
    lines = tuple(replace(line, cells={**line.cells, "max_loss_difference": Cell(2e-6)}) for line in table)
    (recovery,) = (one for one in find_recipe("tab:moe").claims if one.id == "matched_recovery")
    assert recovery.check(Table(lines)).verdict == FAILS
    assert recovery.check(Table(table.find(router_loss="none"))).verdict == OPEN


def test_every_seed_has_to_agree() -> None:
    lines = tuple(
        Line({"router_loss": name, "seed": seed}, {"entropy": Cell(value)})
        for seed, pair in (("mean", (1.70, 1.71)), ("1", (1.6, 1.7)), ("2", (1.80, 1.72)))
        for name, value in zip(("active-route mean", "token-layer mean"), pair, strict=True)
    )
    (lower,) = (one for one in find_recipe("tab:moe").claims if one.id == "mean_lowers_entropy")
    judgement = lower.check(Table(lines))
    assert judgement.verdict == FAILS
    assert "seed 2" in judgement.evidence
