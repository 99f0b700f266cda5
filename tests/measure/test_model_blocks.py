"""Blocks for one model: what its tokenizer gives must have a row in its embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import configs, save_model, save_tokenizer
from zloss.cli.main import main
from zloss.errors import CheckpointError
from zloss.measure.measurement import model_blocks
from zloss.models.checkpoint import Checkpoint, load_checkpoint, positions_of
from zloss.text import open_corpus


def test_ids_beyond_the_embedding_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    config, folder = configs()["gpt2"], tmp_path / "narrow"
    config.vocab_size = 300  # the tokenizer has 500 entries
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"token id \d+, but the input embedding has 300 rows"):
        model_blocks(load_checkpoint(str(folder)), open_corpus((), None), size=16, count=4)
    for command in (["audit"], ["train", "--steps", "2", "--warmup", "0"]):
        words = [command[0], str(folder), *command[1:], "--block-size", "16", "--out", str(tmp_path / command[0])]
        assert main(words) == 2
        assert "the input embedding has 300 rows" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "expected"), [("gpt2", (128, True)), ("neox", (128, False)), ("phi", (128, False))])
def test_learned_positions_end_and_rotary_ones_do_not(kind: str, expected: tuple[int, bool], tmp_path: Path) -> None:
    assert positions_of(load_checkpoint(str(save_model(kind, tmp_path)))) == expected


def test_families_with_a_table_are_recognized() -> None:
    """OPT reserves two rows of its table; GPT-J keeps rotary sines in one; BLOOM has no positions."""
    import transformers as t

    small = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = {
        "opt": t.OPTForCausalLM(
            t.OPTConfig(**small, hidden_size=16, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=40)
        ),
        "gptj": t.GPTJForCausalLM(
            t.GPTJConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=40)
        ),
        "bloom": t.BloomForCausalLM(t.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)),
    }
    found = {name: positions_of(Checkpoint(name, "config", model, None, False)) for name, model in made.items()}
    assert found == {"opt": (40, True), "gptj": (40, True), "bloom": None}
