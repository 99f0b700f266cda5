"""A Llama with random weights: time and memory do not depend on them."""

from __future__ import annotations

from typing import Any

import torch


def llama(vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, *, tied: bool = True) -> Any:
    """The model in training mode, with weights from a fixed seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    maker: Any = LlamaForCausalLM
    return maker(config).train()
