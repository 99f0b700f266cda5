"""The mixture-of-experts recipes: small runs through the command's own path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paper.claim_tables import own, verdicts
from tests.train.tiny_run import some_text
from zloss_paper.engine.claims import HOLDS
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.reproduction import Reproduction, reproduce, write_reproduction
from zloss_paper.engine.workbench import Workbench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("moe-recipe")
    (place / "text.txt").write_text(some_text(), encoding="utf-8")
    return place


def smoke(folder: Path, label: str) -> Reproduction:
    overrides = Overrides(texts=(str(folder / "text.txt"),), text_source="CPython, PSF-2.0")
    return reproduce(find_recipe(label), "smoke", overrides, Workbench(folder / "out"))


def test_a_small_table_is_trained_judged_and_drawn(folder: Path) -> None:
    result = smoke(folder, "tab:moe")
    assert len(result.table) == 6 + 6 * 2
    found = verdicts(result)
    assert found["relative_scales"] == found["matched_recovery"] == found["similar_ce"] == HOLDS
    (mean,) = result.table.find(router_loss="active-route sum", seed="mean")
    single = result.table.find(router_loss="active-route sum")[1:]
    assert mean.cells["entropy"].value == pytest.approx(sum(line.cells["entropy"].value for line in single) / 2)
    beside = result.recipe.beside(mean)
    assert beside is not None
    assert beside.cells["entropy"].value == 1.756
    assert result.recipe.beside(single[0]) is None
    paths = write_reproduction(folder / "page", result)
    assert {path.name for path in paths} == {"tab_moe.json", "tab_moe.md", "moe_top4.svg"}
    written = "".join(path.read_text(encoding="utf-8") for path in paths)
    assert str(folder) not in written
    # A second call trains nothing: same numbers, same figure.
    again = smoke(folder, "tab:moe")
    assert again.record.to_dict()["rows"] == result.record.to_dict()["rows"]
    assert again.record.notes == result.record.notes


def test_top_2_has_the_papers_scales(folder: Path) -> None:
    result = smoke(folder, "text:moe_top2")
    assert verdicts(result)["relative_scales"] == HOLDS
    scales = {line.key["convention"]: line.cells["s_rel"].value for line in result.table.find(seed="mean")}
    assert (scales["active-route mean"], scales["active-route sum"]) == (0.5, 2.0)
    assert all(scales[line.key["convention"]] == line.cells["s_rel"].value for line in own("text:moe_top2"))


def test_paper_scale_is_the_papers_and_a_model_that_is_not_used_is_said() -> None:
    for label, top_k, steps in (("tab:moe", 4, 1200), ("text:moe_top2", 2, 800)):
        grid = find_recipe(label).configure("paper", Overrides()).grid
        moe = grid.base.moe
        assert (moe.top_k, moe.layers, moe.width, moe.heads, moe.experts) == (top_k, 4, 256, 4, 8)
        assert (moe.load_balance, grid.router_coefs, grid.base.steps, len(grid.seeds)) == (1e-2, (1e-3,), steps, 3)
        assert grid.base.corpus == "wikitext-103"
        assert not find_recipe(label).configure("smoke", Overrides()).notes
        assert "ignored" in find_recipe(label).configure("smoke", Overrides(models=("gpt2",))).notes[0]
