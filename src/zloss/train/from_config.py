"""A small language model from scratch: a shape by name or a Hugging Face config file, with a tokenizer of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zloss.errors import CheckpointError, InputError, MissingDependencyError, first_line
from zloss.models.checkpoint import Checkpoint
from zloss.text.corpus import Corpus

DEFAULT_VOCAB = 4096
SPECIAL = ("<s>", "</s>")
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


def train_tokenizer(corpus: Corpus, vocab: int) -> Any:
    """A byte-level BPE of `vocab` entries from the documents of a corpus; deterministic."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingDependencyError("tokenizers", "Training a tokenizer", "train") from error
    if vocab < 256 + len(SPECIAL):
        raise InputError(
            f"a byte-level vocabulary is expected to have at least {256 + len(SPECIAL)} entries, but got {vocab}."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_paragraphs(corpus), trainer)
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1])


def load_tokenizer(name: str) -> Any:
    """A tokenizer by Hugging Face name or folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "A tokenizer", "train") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer {name!r} cannot be loaded ({first_line(error)}): pass a name or folder in the Hugging Face "
            "format, or train one with `train_tokenizer`."
        ) from error


def _paragraphs(corpus: Corpus) -> Iterator[str]:
    """Documents in short pieces: the trainer keeps each piece whole in memory."""
    for document in corpus.documents:
        yield from document.split("\n\n")


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
