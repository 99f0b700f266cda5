"""The paper's numbers as data: rounding units, keys, and recipes that agree with the settings it states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zloss_paper
from zloss.errors import UnknownNameError
from zloss.results.quantities import define
from zloss_paper.engine.audited_models import AuditedModel
from zloss_paper.engine.inputs import MODEL_IDS
from zloss_paper.engine.recipe import Overrides
from zloss_paper.engine.registry import find_recipe, labels
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


def test_pairs_meet_their_own_model_and_corpus() -> None:
    pairs = paper_table("tab:spectral_audit").table.pairs()
    assert len(pairs) == 7
    for pair in pairs:
        assert {**pair.raw.key, "head": "centered"} == pair.centered.key


def test_an_unknown_label_is_named() -> None:
    with pytest.raises(UnknownNameError, match="tab:pretrained"):
        paper_table("tab:pretraind")
    with pytest.raises(UnknownNameError, match="tab:pretrained"):
        find_recipe("tab:pretraind")
    assert find_recipe("pretrained").label == "tab:pretrained"
    assert find_recipe("fig:gradient_geometry").label == "text:gradient_geometry"


@pytest.mark.parametrize("label", labels())
def test_every_setting_the_paper_leaves_open_has_our_choice(label: str) -> None:
    recipe = find_recipe(label)
    choices = recipe.unstated()
    assert all(choices.values())
    if recipe.paper is not None:
        assert set(choices) == set(recipe.paper.not_stated)
        # A choice for something the paper does state would be a contradiction in waiting.
        own = set(json.loads(CHOICES.read_text(encoding="utf-8"))["labels"].get(label, {})) - {"shared"}
        assert {name.partition(".")[0] for name in choices} >= own - {"vocab_size", "corpus_variant"}


@pytest.mark.parametrize("label", labels())
def test_every_column_of_a_recipe_has_a_symbol(label: str) -> None:
    assert not [column for column in find_recipe(label).columns if define(column) is None]


def audited(label: str) -> tuple[AuditedModel, ...]:
    """The audits of a table at the paper's scale."""
    models: tuple[AuditedModel, ...] = find_recipe(label).configure("paper", Overrides()).rows
    return models


def test_block_counts_are_those_the_paper_states() -> None:
    for label in ("tab:pretrained", "tab:fineweb_pretrained"):
        counts = {model.model: model.audit.blocks for model in audited(label)}
        assert counts == paper_table(label).config["num_sequences"]
    stated = paper_table("tab:spectral_audit").config["num_sequences"]
    for model in audited("tab:spectral_audit"):
        assert stated[f"{model.model} / {model.corpus}"] in (None, model.audit.blocks)


def test_other_settings_are_those_the_paper_states() -> None:
    for label in ("tab:pretrained", "tab:fineweb_pretrained", "text:gradient_geometry", "tab:spectral_audit"):
        config = paper_table(label).config
        for name, identifier in config["model_ids"].items():
            assert identifier in (None, MODEL_IDS[name])
    for label in ("tab:pretrained", "tab:fineweb_pretrained"):
        config = paper_table(label).config
        for model in audited(label):
            assert model.audit.block_size == config["block_size"]
            assert model.audit.diag_coef == config["lambda_diag"]
            assert config["num_predictions"][model.model] == model.audit.blocks * model.audit.block_size
    figure, (model,) = paper_table("text:gradient_geometry").config, audited("text:gradient_geometry")
    assert figure["seed_values"] == [model.audit.seed]
    assert (figure["num_sequences"], figure["eval_batch_size"]) == (model.audit.blocks, model.audit.batch_blocks)
