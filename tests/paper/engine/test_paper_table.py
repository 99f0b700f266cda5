"""The paper's numbers as data: rounding units, keys, and recipes that agree with the settings it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zloss_paper
from zloss.errors import UnknownNameError
from zloss.results.quantities import define
from zloss_paper.engine.inputs import MODEL_IDS
from zloss_paper.engine.recipe import Overrides, find_recipe, labels
from zloss_paper.engine.table import paper_table

CHOICES = Path(zloss_paper.__file__).parent / "data" / "choices.json"


def test_the_rounding_unit_is_read_from_the_printed_zeros() -> None:
    table = paper_table("tab:spectral_audit").table
    (line,) = table.find(model="GPT-2 Medium", corpus="FineWeb-Edu", head="raw")
    assert line.cells["a_p_99"].printed == "28.00"
    assert line.cells["a_p_99"].half_unit == pytest.approx(0.005)
    (centered,) = paper_table("tab:pretrained").table.find(model="DistilGPT-2", head="centered")
    assert centered.cells["mu_abs_99"].value == 6e-6
    assert centered.cells["mu_abs_99"].half_unit == pytest.approx(5e-8)


def test_an_unknown_label_is_named() -> None:
    for find in (paper_table, find_recipe):
        with pytest.raises(UnknownNameError, match="tab:pretrained"):
            find("tab:pretraind")
    assert find_recipe("pretrained").label == "tab:pretrained"
    assert find_recipe("fig:gradient_geometry").label == "text:gradient_geometry"


@pytest.mark.parametrize("label", labels())
def test_every_setting_the_paper_leaves_open_has_our_choice_and_every_column_a_symbol(label: str) -> None:
    recipe = find_recipe(label)
    choices = recipe.unstated()
    assert all(choices.values())
    if recipe.paper is not None:
        assert set(choices) == set(recipe.paper.not_stated)
        # A choice for something that the paper states could contradict it.
        own = set(json.loads(CHOICES.read_text(encoding="utf-8"))["labels"].get(label, {})) - {"shared"}
        assert {name.partition(".")[0] for name in choices} >= own - {"vocab_size", "corpus_variant"}
    assert not [column for column in recipe.columns if define(column) is None]


@pytest.mark.parametrize("label", ["tab:pretrained", "tab:fineweb_pretrained", "tab:spectral_audit"])
def test_audits_at_paper_scale_are_those_the_paper_states(label: str) -> None:
    recipe = find_recipe(label)
    assert recipe.paper is not None
    models, stated = recipe.configure("paper", Overrides()).rows, recipe.paper.config
    spectral = label == "tab:spectral_audit"
    printed = [(line.key["model"], line.key.get("corpus")) for line in recipe.paper.table.find(head="raw")]
    assert [(model.model, model.corpus if spectral else None) for model in models] == printed
    for model in models:
        audit = model.audit
        assert audit.model == MODEL_IDS[model.model]
        assert stated["model_ids"].get(model.model) in (None, audit.model)
        assert (audit.block_size, model.deviations) == (256, ())
        key = f"{model.model} / {model.corpus}" if spectral else model.model
        assert stated["num_sequences"][key] in ((None, audit.blocks) if spectral else (audit.blocks,))
        if not spectral:
            assert (audit.block_size, audit.diag_coef) == (stated["block_size"], stated["lambda_diag"])
            assert stated["num_predictions"][key] == audit.blocks * audit.block_size


def test_the_figure_at_paper_scale_is_that_of_the_paper() -> None:
    stated = paper_table("text:gradient_geometry").config
    (model,) = find_recipe("text:gradient_geometry").configure("paper", Overrides()).rows
    assert stated["seed_values"] == [model.audit.seed]
    assert (stated["num_sequences"], stated["eval_batch_size"]) == (model.audit.blocks, model.audit.batch_blocks)
