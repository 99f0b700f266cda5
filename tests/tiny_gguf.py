"""A tiny Llama as a GGUF file, with random weights and the tokenizer of the tiny models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_models import WIDTH, tokenizer_json

Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def tiny_tensors(seed: int = 0) -> Tensors:
    """All tensors of the model, by their GGUF names."""
    rng = np.random.default_rng(seed)
    vocab, narrow, wide = len(_tokens()), WIDTH // 2, 48
    shapes = {
        "token_embd": (vocab, WIDTH),
        "output": (vocab, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (narrow, WIDTH),
        "blk.0.attn_v": (narrow, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (wide, WIDTH),
        "blk.0.ffn_up": (wide, WIDTH),
        "blk.0.ffn_down": (WIDTH, wide),
    }
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(file: Path, tensors: Mapping[str, Any], *, layers: int = 1) -> Path:
    """The file with these tensors and the metadata of the whole model."""
    import gguf

    writer: Any = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // 4)
    writer.add_vocab_size(len(_tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(_tokens())
    merges = json.loads(tokenizer_json())["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tokens() -> list[str]:
    vocab: dict[str, int] = json.loads(tokenizer_json())["model"]["vocab"]
    return sorted(vocab, key=lambda token: vocab[token])
