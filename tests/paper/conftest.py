"""Two tiny checkpoints in the Hugging Face format, made once: random weights and a tokenizer trained on pydoc text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PreTrainedTokenizerFast

from zloss.text import pydoc_topics

VOCAB, WIDTH = 400, 32
PADDED = 416
"""Rows of the untied head: more than the tokenizer has, as in the Pythia models."""
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied GPT-2 whose rows share a mean, so that its logits have a common shift."""
    sizes = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return saved(config, tmp_path_factory.mktemp("models") / "tiny-gpt2", seed=1, scale=4, shift=0.3)


@pytest.fixture(scope="session")
def neox_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-NeoX with an untied head."""
    sizes = {"vocab_size": PADDED, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GPTNeoXConfig(**sizes, intermediate_size=64, max_position_embeddings=256, tie_word_embeddings=False)
    return saved(config, tmp_path_factory.mktemp("models") / "tiny-neox", seed=2, scale=10, shift=0.5)


def saved(config: Any, folder: Path, *, seed: int, scale: float, shift: float) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale).add_(shift * torch.randn(WIDTH))
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(pydoc_topics()[:20], vocab_size=VOCAB, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
    return folder
