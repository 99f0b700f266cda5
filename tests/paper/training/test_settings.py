"""Training recipes at paper scale have the settings the paper states; at small scale they say in what they deviate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.paper.claim_tables import DESCRIBED, TABLES, own
from zloss.errors import CorpusError, InputError
from zloss.results.run_config import TrainConfig
from zloss.train.data import open_data, training_text
from zloss.train.start import train_tokenizer
from zloss_paper.engine.inputs import METHODS, MODEL_IDS, RAW_METHODS
from zloss_paper.engine.recipe import Overrides, find_recipe
from zloss_paper.engine.table import paper_table
from zloss_paper.training.low_coefficient import FINETUNE, MEDIUM_LONG
from zloss_paper.training.settings import CPU, SMOKE, Scale, TrainingTableConfig, base_config, small_config, split

STATED = {
    **{
        name: name
        for name in ("block_size", "steps", "micro_batch", "beta1", "beta2", "lr", "weight_decay", "gain_beta")
    },
    "grad_accumulation": "accumulate",
    "effective_batch_sequences": "blocks_per_step",
    "warmup_steps": "warmup",
    "clip_threshold": "clip",
    "eval_sequences": "valid_blocks",
    "train_sequences": "blocks",
    "train_offset": "offset",
    "lambda_diag": "diag_coef",
    "optimizer_state_sample_every": "adam_every",
}
"""The paper's names of settings, and ours."""


def paper_config(label: str) -> TrainingTableConfig:
    config: TrainingTableConfig = find_recipe(label).configure("paper", Overrides())
    return config


@pytest.mark.parametrize("label", TABLES)
def test_paper_scale_is_what_the_paper_states(label: str) -> None:
    stated, config = paper_table(label).config, paper_config(label)
    ours: TrainConfig = config.train
    compared = 0
    for name, field in STATED.items():
        if stated.get(name) is not None:
            assert getattr(ours, field) == pytest.approx(stated[name]), name
            compared += 1
    assert compared >= 8
    ((model, identifier),) = stated["model_ids"].items()
    assert ours.model == MODEL_IDS[model]
    assert identifier in (None, ours.model)
    assert ours.corpus == {"WikiText-103": "wikitext-103", "FineWeb-Edu": "fineweb-edu"}[stated["corpus"]]
    if stated.get("eval_offset") is not None:
        assert ours.valid_offset == stated["eval_offset"]
    consumed = stated["train_tokens_consumed_per_run"]
    assert ours.steps * ours.tokens_per_step == pytest.approx(consumed, rel=0.02)
    if stated.get("train_tokens_available") is not None and ours.blocks is not None:
        assert ours.blocks * ours.block_size == pytest.approx(stated["train_tokens_available"], rel=0.02)
    assert len(config.seeds) == stated["seeds_count"]
    assert (ours.precision, ours.head) == ("bf16", "paper")
    assert ours.target is None  # log V
    assert not ours.untie
    assert not ours.head_shift
    assert not config.deviations
    assert config.base is None
    choice = find_recipe(label).unstated().get("seed_values")
    assert choice in (None, ", ".join(str(seed) for seed in config.seeds))
    # Arms are the lines of the table.
    printed = [(line.key["method"], line.key.get("lambda_aux")) for line in own(label)]
    assert printed == [(arm.method, dict(arm.key).get("lambda_aux")) for arm in config.arms]
    for arm in config.arms:
        if METHODS[arm.method] in ("ce", "centered-head"):
            assert arm.coef == 0
        elif not isinstance(stated["lambda_aux"], str):  # the sweep has a column instead
            assert arm.coef == stated["lambda_aux"]


def test_runs_the_paper_only_describes() -> None:
    medium = paper_config("text:fineweb_medium_2400").train
    assert (medium.steps, medium.warmup, medium.micro_batch, medium.accumulate) == (2400, 120, 8, 2)
    assert medium.steps * medium.tokens_per_step == pytest.approx(9.83e6, rel=1e-3)
    assert medium.valid_blocks * medium.block_size == 65_536
    sweep = paper_config("text:raw_sweep_1e3")
    assert sweep.train == paper_config("tab:fineweb_update_outlier").train
    assert {arm.method for arm in sweep.arms if arm.coef == 1e-3} == set(RAW_METHODS)
    assert sweep.arms[0].method == "CE baseline"
    # Their seeds are a separate set.
    for label in ("tab:gpt2_diag", "tab:fineweb_medium_ft", "tab:adam_state_stress", "text:fineweb_medium_2400"):
        assert not set(paper_config("tab:finetune").seeds) & set(paper_config(label).seeds), label


def cpu(label: str, **changes: Any) -> TrainingTableConfig:
    config: TrainingTableConfig = find_recipe(label).configure("cpu", Overrides(**changes))
    return config


def test_small_runs_are_long_enough_and_matched_to_their_table() -> None:
    for label in (*TABLES, *DESCRIBED):
        config = cpu(label)
        assert config.train.steps >= 200
        assert config.base is not None
        assert config.deviations
        assert len(config.seeds) == 2
        assert config.train.clip == paper_config(label).train.clip
        assert config.arms == paper_config(label).arms
    low = cpu("tab:finetune").train
    assert cpu("tab:stress_diag").train == cpu("tab:medium_ft").train == cpu("text:fineweb_medium_2400").train == low
    for label in ("tab:fineweb_noclip_stress", "tab:fineweb_update_outlier"):
        factor = paper_config(label).train.lr / paper_config("tab:finetune").train.lr
        assert cpu(label).train.lr == pytest.approx(factor * low.lr)
    assert not cpu("tab:gpt2_diag").train.untie


def test_parts_of_a_text_do_not_overlap(tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_bytes(b"x" * 8_000_000)
    for scale, profile in ((CPU, "cpu"), (SMOKE, "smoke")):
        for texts in ((), (str(long),)):
            base = base_config(scale, texts)
            run = small_config(profile, FINETUNE.small, texts)
            assert base.blocks is not None
            assert run.blocks is not None
            assert run.offset == base.blocks
            assert run.valid_offset == base.valid_offset == base.blocks + run.blocks
            assert run.valid_blocks == base.valid_blocks
    run = small_config("cpu", FINETUNE.small, (str(long),))
    assert run.steps * run.blocks_per_step / (run.blocks or 0) == pytest.approx(0.96, abs=0.005)
    subset = small_config("cpu", MEDIUM_LONG.small, (str(long),))
    assert subset.steps * subset.blocks_per_step / (subset.blocks or 0) == pytest.approx(9.375, rel=0.02)


@pytest.mark.parametrize("scale", [CPU, SMOKE])
def test_the_embedded_text_has_the_blocks_that_were_counted(scale: Scale) -> None:
    """Blocks are counted by bytes before there is a tokenizer; the tokenizer of the recipe gives at least as many."""
    config = base_config(scale, ())
    tokenizer = train_tokenizer(training_text(config), scale.vocab)
    assert open_data(config, tokenizer, None).valid.count == config.valid_blocks


def test_a_short_or_missing_text_is_one_sentence(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words " * 50)
    with pytest.raises(CorpusError, match="give a longer text"):
        split(CPU, (str(short),))
    with pytest.raises(CorpusError, match=r"none\.txt"):
        cpu("tab:finetune", texts=(str(tmp_path / "none.txt"),))


def test_other_models_and_counts(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    medium = find_recipe("tab:medium_ft").configure
    for models, model, deviations in (
        ((f"gpt2-medium={folder}", "gpt2=x"), str(folder), ()),
        ((str(folder),), str(folder), ("the model is mine, not GPT-2 Medium",)),
        ((f"gpt2={folder}",), "gpt2-medium", ()),
    ):
        config = medium("paper", Overrides(models=models))
        assert (config.train.model, config.base, config.deviations) == (model, None, deviations)
    with pytest.raises(InputError, match="'nonsense' is not a model of the paper"):
        medium("paper", Overrides(models=(f"nonsense={folder}",)))
    config = find_recipe("tab:finetune").configure("paper", Overrides(blocks=100))
    assert (config.train.blocks, config.deviations) == (100, ("100 blocks of 256, not all of 256",))
