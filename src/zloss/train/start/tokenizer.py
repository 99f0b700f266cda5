"""The tokenizer of a model from scratch: trained on a text, or loaded by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zloss.errors import CheckpointError, InputError, MissingDependencyError, first_line
from zloss.text import Corpus

DEFAULT_VOCAB = 4096
"""Entries of a trained tokenizer where none are asked for."""
SPECIAL = ("<s>", "</s>")
"""BOS and EOS of a trained tokenizer."""


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
