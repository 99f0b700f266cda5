"""The paper's numbers as data: rounding units, keys, and recipes that agree with the settings it states."""

from __future__ import annotations

from typing import Any

import pytest

from zloss.errors import UnknownNameError
from zloss_paper.engine.paper_models import MODEL_IDS
from zloss_paper.engine.paper_table import paper_table
from zloss_paper.engine.registry import find_recipe, labels
from zloss_paper.heads import fineweb_pretrained, gradient_geometry, pretrained, spectral_audit


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
        assert {name.partition(".")[0] for name in choices} >= set(recipe.choices) - {"vocab_size", "corpus_variant"}


def _counts(targets: Any) -> dict[str, int]:
    return {target.model: target.audit.blocks for target in targets}


def test_block_counts_are_those_the_paper_states() -> None:
    for module, label in ((pretrained, "tab:pretrained"), (fineweb_pretrained, "tab:fineweb_pretrained")):
        assert _counts(module.TARGETS) == paper_table(label).config["num_sequences"]  # type: ignore[attr-defined]
    stated = paper_table("tab:spectral_audit").config["num_sequences"]
    for target in spectral_audit.TARGETS:
        assert stated[f"{target.model} / {target.corpus}"] in (None, target.audit.blocks)


def test_other_settings_are_those_the_paper_states() -> None:
    for label in ("tab:pretrained", "tab:fineweb_pretrained", "text:gradient_geometry", "tab:spectral_audit"):
        config = paper_table(label).config
        for name, identifier in config["model_ids"].items():
            assert identifier in (None, MODEL_IDS[name])
    for module, label in ((pretrained, "tab:pretrained"), (fineweb_pretrained, "tab:fineweb_pretrained")):
        config = paper_table(label).config
        for target in module.TARGETS:  # type: ignore[attr-defined]
            assert target.audit.block_size == config["block_size"]
            assert target.audit.diag_coef == config["lambda_diag"]
            assert config["num_predictions"][target.model] == target.audit.blocks * target.audit.block_size
    figure, (target,) = paper_table("text:gradient_geometry").config, gradient_geometry.TARGETS
    assert figure["seed_values"] == [target.audit.seed]
    assert (figure["num_sequences"], figure["eval_batch_size"]) == (target.audit.blocks, target.audit.batch_blocks)
    assert (figure["svd"], figure["precision"]) == (target.audit.svd, target.audit.dtype)
