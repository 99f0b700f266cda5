"""Blocks for one model: what its tokenizer gives must have a row in its embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_models import configs, save_tokenizer
from zloss.cli.main import main
from zloss.errors import CheckpointError
from zloss.measure.measurement import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint, positions_of
from zloss.text import open_corpus


def save_narrow(folder: Path, vocab: int) -> Path:
    """A GPT-2 whose embedding has `vocab` rows, with the tokenizer of 500 entries."""
    config = configs()["gpt2"]
    config.vocab_size = vocab
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def test_ids_beyond_the_embedding_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_narrow(tmp_path / "narrow", 300)
    with pytest.raises(CheckpointError, match=r"token id \d+, but the input embedding has 300 rows"):
        model_blocks(load_checkpoint(str(folder)), open_corpus((), None), size=16, count=4)
    for command in (["audit"], ["train", "--steps", "2", "--warmup", "0"]):
        words = [command[0], str(folder), *command[1:], "--block-size", "16", "--out", str(tmp_path / command[0])]
        assert main(words) == 2
        assert "the input embedding has 300 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("gpt2", configs()["gpt2"], (128, True)),
        ("neox", configs()["neox"], (128, False)),  # rotary positions have no end
        ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 40}, (40, True)),  # 42 rows
        ("gptj", {"rotary_dim": 4, "n_positions": 40}, (40, True)),  # sines of rotary positions are in a table
        ("bloom", {}, None),
    ],
)
def test_learned_positions_end_and_rotary_ones_do_not(
    kind: str, config: Any, expected: tuple[int, bool] | None
) -> None:
    if isinstance(config, dict):
        small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = AutoConfig.for_model(kind, **small, **config)
    model = AutoModelForCausalLM.from_config(config)
    assert positions_of(Checkpoint(kind, "config", model, None, False)) == expected
