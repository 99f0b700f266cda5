"""A small language model from scratch: a shape by name or a Hugging Face config file, for a given tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zloss.errors import CheckpointError, MissingDependencyError, first_line
from zloss.models.checkpoint import Checkpoint

_LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "use_cache": False}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "small": {
        **_LLAMA,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_hidden_layers": 7,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
}
"""At a vocabulary of 4096: tiny has 0.4 M parameters, small 10 M."""


def build_from_config(shape: str, tokenizer: Any, *, block_size: int, seed: int) -> Checkpoint:
    """The model of a shape with weights drawn from `seed`; the global random state stays as it was."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError("transformers", "A model from a config", "train") from error
    fields = _shape(shape)
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("max_position_embeddings", max(block_size + 1, 256))
    if fields["vocab_size"] < len(tokenizer):
        raise CheckpointError(
            f"the config {shape!r} has vocab_size {fields['vocab_size']}, but the tokenizer has {len(tokenizer)} entries."
        )
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    factory: Any = AutoConfig
    maker: Any = AutoModelForCausalLM
    try:
        config = factory.for_model(**(fields | ids))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = maker.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise CheckpointError(f"the config {shape!r} gives no causal language model: {first_line(error)}.") from error
    return Checkpoint(f"from-config:{Path(shape).stem}", "config", model, tokenizer, wants_bos=False)


def _shape(shape: str) -> dict[str, Any]:
    """The fields of a Hugging Face config, by name or from a file."""
    if shape in SHAPES:
        return dict(SHAPES[shape])
    path = Path(shape)
    if not path.is_file():
        raise CheckpointError(f"no config {shape!r}: it is neither a file here nor one of {', '.join(SHAPES)}.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the config {shape} cannot be read: {first_line(error)}.") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise CheckpointError(f"the config {shape} has no `model_type`: it is not a Hugging Face model config.")
    return data
