"""Recipes run on local folders, share their audits, print what the audit found, and name their deviations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from tests.paper.claim_tables import smoke, verdicts
from zloss.console import Silent
from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint
from zloss.results.reproduction import NOT_JUDGED
from zloss.text import Blocks, pydoc_topics
from zloss_paper.engine.claims import FAILS, HOLDS, OPEN
from zloss_paper.engine.inputs import BY_SHA256, text_sources
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.reproduction import reproduce, write_reproduction
from zloss_paper.engine.table import paper_table
from zloss_paper.engine.workbench import Workbench, text_blocks
from zloss_paper.heads.gradients import sample_errors
from zloss_paper.heads.recipe import DEPLOYED, deployed_perplexity


@pytest.fixture(scope="module")
def bench() -> Workbench:
    """One workbench for the module: what two tests ask for runs once."""
    return Workbench()


@pytest.fixture(scope="module")
def both(gpt2_folder: Path, neox_folder: Path) -> Overrides:
    return Overrides(models=(str(gpt2_folder), str(neox_folder)))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "topics.txt"
    file.write_text("\n\n".join(pydoc_topics()[:60]), encoding="utf-8")
    return file


def test_audit_recipes_share_one_audit_per_model(both: Overrides, bench: Workbench) -> None:
    tables = "tab:pretrained tab:fineweb_pretrained tab:spectral_audit tab:router"
    for label in (*tables.split(), "text:gradient_geometry", "text:tied_paths", "text:reporting"):
        smoke(label, both, bench)
    assert bench.audits_made == 2


def test_lines_are_the_numbers_of_the_audit(both: Overrides, bench: Workbench) -> None:
    result = smoke("tab:pretrained", both, bench)
    config: Any = result.config
    report = bench.audit(config.rows[0].audit)
    (raw,), (centered,) = (result.table.find(model="tiny-gpt2", head=head) for head in ("raw", "centered"))
    assert raw.cells["p_z_999"].value == report.heads.raw.p_z_999
    assert centered.cells["p_z_999"].value == report.heads.centered.p_z_999
    assert raw.cells["ppl"].value == report.ppl
    assert centered.cells["ppl"].value == report.extra[DEPLOYED]["centered"] != report.ppl
    assert raw.deviations
    assert "not the paper's" in raw.deviations[0]
    assert not result.record.comparable


def test_deployed_perplexity_is_that_of_the_centered_weights(
    gpt2_folder: Path, neox_folder: Path, bench: Workbench
) -> None:
    """Against a straight fp64 definition: rows minus their mean, log-softmax, mean over all predictions."""
    for folder in (gpt2_folder, neox_folder):
        result = smoke("tab:pretrained", Overrides(models=(str(folder),)), bench)
        config: Any = result.config
        audit = config.rows[0].audit
        checkpoint = bench.checkpoint(audit)
        blocks = text_blocks(audit, checkpoint)
        hidden = bench.hidden(audit).double()
        weight = checkpoint.model.get_output_embeddings().weight.detach().double()
        logits = hidden @ (weight - weight.mean(0)).T
        targets = blocks.targets(0, blocks.count).reshape(-1)
        straight = math.exp(cross_entropy(logits, targets))
        (centered,) = result.table.find(head="centered")
        assert centered.cells["ppl"].value == pytest.approx(straight, rel=1e-6)
        # The oracle can fail: one position off is another number.
        wrong = math.exp(cross_entropy(logits, targets.roll(1)))
        assert centered.cells["ppl"].value != pytest.approx(wrong, rel=1e-3)


def test_a_large_vocabulary_does_not_bias_the_perplexity() -> None:
    """On peaked logits torch's fp32 cross-entropy loses small terms of the softmax sum, more than centering changes."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50_000, n_positions=64, n_embd=16, n_layer=1, n_head=2)).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(60).add_(2 * torch.randn(16))
    blocks = Blocks(torch.randint(50_000, (4 * 64 + 1,)), 64, 4, None, 0)
    found = deployed_perplexity(Checkpoint("tiny", "", model, None, False), blocks, Silent())
    with torch.no_grad():
        logits = model(blocks.inputs(0, 4)).logits.flatten(0, 1)
    target = blocks.targets(0, 4).reshape(-1)
    straight = math.exp(cross_entropy(logits.double(), target))
    assert found["raw"] == pytest.approx(straight, rel=2e-7)
    assert found["centered"] == pytest.approx(straight, rel=2e-7)
    # The mutation: the softmax left in fp32.
    assert math.exp(cross_entropy(logits, target, reduction="none").double().mean()) != pytest.approx(
        straight, rel=2e-7
    )


def test_general_claims_are_judged_on_any_model(both: Overrides, bench: Workbench) -> None:
    found = verdicts(smoke("tab:pretrained", both, bench))
    assert found["ppl_preserved"] == found["shift_removed"] == HOLDS
    assert found["p_z_999_factor_gpt-2"] == found["pythia_1b_contrast"] == OPEN
    geometry = verdicts(smoke("text:gradient_geometry", both, bench))
    assert geometry["one_translation"] == geometry["gain_identity"] == HOLDS
    router = verdicts(smoke("tab:router", both, bench))
    assert set(router.values()) == {HOLDS}


def test_a_figure_sample_that_is_not_a_translation_is_seen(both: Overrides, bench: Workbench) -> None:
    config: Any = smoke("text:gradient_geometry", both, bench).config
    sample = bench.audit(config.rows[0].audit).figures.geometry
    assert sample is not None
    good = sample_errors(sample, "centered")
    bad = sample_errors(
        replace(sample, x_centered=sample.x_centered[::-1], delta_u_centered=sample.delta_u_raw), "centered"
    )
    for name in ("translation_error", "identity_error"):
        assert good[name] < 1e-4 < 1e-3 < bad[name]  # type: ignore[operator]
    turned = sample_errors(replace(sample, y_centered=sample.y_centered[::-1]), "centered")
    assert turned["translation_error"] > 1e-3  # type: ignore[operator]
    assert turned["identity_error"] == good["identity_error"]


def test_an_untied_head_has_no_input_path(both: Overrides, bench: Workbench) -> None:
    result = smoke("text:tied_paths", both, bench)
    (tied,), (untied,) = (result.table.find(table=kind) for kind in ("tied", "untied"))
    assert tied.cells["input_path_norm"].value > 0
    assert "input_path_norm" not in untied.cells
    assert "untied" in untied.reasons["input_path_norm"]
    assert verdicts(result)["no_input_path"] == HOLDS


def test_paper_recipes_run_unchanged_on_local_folders(
    gpt2_folder: Path, neox_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    """The figure and the tied paths at full count; NAME=FOLDER puts a folder in the paper's line of that name."""
    overrides = Overrides(models=(f"gpt2={gpt2_folder}", f"Pythia-160M={neox_folder}"), texts=(str(text_file),))
    bench = Workbench(tmp_path)
    tied = reproduce(find_recipe("text:tied_paths"), "paper", overrides, bench)
    assert [line.key["model"] for line in tied.table] == ["GPT-2", "Pythia-160M"]
    assert all(model.audit.gradient_blocks == 8 for model in tied.config.rows)
    assert verdicts(tied)["pythia_budget"] in (HOLDS, FAILS)  # both were measured, so it is decided
    figure = reproduce(
        find_recipe("text:gradient_geometry"), "paper", replace(overrides, models=(f"gpt2={gpt2_folder}",)), bench
    )
    (model,) = figure.config.rows
    audit = model.audit
    assert (audit.blocks, audit.block_size, audit.seed, audit.svd) == (32, 256, 67, "randomized")
    assert model.deviations == ("the text is topics.txt, not WikiText-103",)
    paths = write_reproduction(tmp_path, figure)
    assert any(path.suffix == ".svg" and path.stat().st_size > 1000 for path in paths)
    short = replace(overrides, blocks=3, block_size=64)
    for label in ("tab:pretrained", "tab:spectral_audit"):
        result = reproduce(find_recipe(label), "paper", short, bench)
        assert [line.key["model"] for line in result.table.find(head="raw")] == ["GPT-2", "Pythia-160M"]
        beside = result.recipe.beside(result.table.lines[0])
        assert beside is not None
        assert beside.key["model"] == "GPT-2"


def test_one_text_for_two_corpora_gives_one_line_per_model(text_file: Path) -> None:
    config = find_recipe("tab:spectral_audit").configure("paper", Overrides(texts=(str(text_file),)))
    assert len({(model.model, model.corpus) for model in config.rows}) == len(config.rows) == 6


def test_a_model_the_table_does_not_have_is_named() -> None:
    with pytest.raises(InputError, match="has no DistilGPT-2"):
        find_recipe("text:tied_paths").configure("paper", Overrides(models=("distilgpt2",)))


def test_the_result_holds_no_path_and_the_whole_story(
    gpt2_folder: Path, text_file: Path, bench: Workbench, tmp_path: Path
) -> None:
    overrides = Overrides(models=(str(gpt2_folder),), texts=(str(text_file),), text_source="CPython, PSF-2.0")
    result = smoke("tab:pretrained", overrides, bench)
    write_reproduction(tmp_path, result)
    text = (tmp_path / "tab_pretrained.json").read_text(encoding="utf-8")
    page = (tmp_path / "tab_pretrained.md").read_text(encoding="utf-8")
    for content in (text, page):
        assert str(gpt2_folder.parent) not in content
        assert str(text_file.parent) not in content
    data = json.loads(text)
    assert data["schema"] == "zloss.reproduction/1"
    assert data["texts"][0]["name"] == "topics.txt"
    assert len(data["texts"][0]["sha256"]) == 64
    assert data["texts"][0]["source"] == "CPython, PSF-2.0"
    assert len(data["paper_rows"]) == 14
    line = data["rows"][0]
    assert line["beside"]["model"] == "GPT-2"
    assert line["ratio"]["ppl"] == pytest.approx(line["ppl"] / 42.58)
    assert {claim["verdict"] for claim in data["claims"]} == {OPEN}
    assert {claim["evidence"] for claim in data["claims"]} == {NOT_JUDGED}
    assert all(claim["on_the_papers_numbers"]["verdict"] == HOLDS for claim in data["claims"])
    assert {choice["setting"] for choice in data["not_stated_by_the_paper"]} == set(
        paper_table("tab:pretrained").not_stated
    )
    assert "not comparable" in page
    assert "263.45" in page
    assert data["provenance"]["command"] in page


def test_known_texts_bring_their_source(text_file: Path) -> None:
    (unknown,) = text_sources((str(text_file),), None)
    assert "--text-source" in unknown.source
    (pydoc,) = text_sources((), None)
    assert pydoc.sha256 is not None
    assert pydoc.licence == "PSF-2.0"
    assert all(len(digest) == 64 and known.source.startswith("https://") for digest, known in BY_SHA256.items())
    assert {known.corpus for known in BY_SHA256.values()} == {"WikiText-103", None}  # the other is not of the paper
