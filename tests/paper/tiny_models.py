"""Tiny models in the Hugging Face format, made from a config with random weights and a tokenizer trained on pydoc text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from zloss.text import pydoc_topics

VOCAB = 400
PADDED = 416
"""Rows of the untied head: more than the tokenizer has, as in the Pythia models."""


def save_gpt2(folder: Path) -> Path:
    """A tied GPT-2 whose rows share a mean, so that its logits have a common shift."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(4).add_(0.3 * torch.randn(32))
    return _save(model, folder)


def save_neox(folder: Path) -> Path:
    """A GPT-NeoX with an untied head."""
    torch.manual_seed(2)
    config = GPTNeoXConfig(
        vocab_size=PADDED,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10).add_(0.5 * torch.randn(32))
    return _save(model, folder)


def _save(model: GPT2LMHeadModel | GPTNeoXForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(pydoc_topics()[:20], vocab_size=VOCAB, show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
    return folder
