"""Training and validation blocks, and the batch of a step as a pure function of seed and step.

No loader keeps a position: a resumed run asks for the batch of its next step and gets what the uninterrupted run got.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zloss.errors import CorpusError, MissingDependencyError, first_line
from zloss.results.train_config import TrainConfig
from zloss.text.blocks import Blocks, make_blocks
from zloss.text.corpus import Corpus, open_corpus

WIKITEXT = "wikitext-103"
WIKITEXT_DATASET = ("Salesforce/wikitext", "wikitext-103-raw-v1")


@dataclass(frozen=True)
class TrainData:
    """Blocks to train on, and where the validation blocks are."""

    train: Blocks
    valid: Blocks
    provenance: dict[str, Any]
    """Names, checksums and token counts of both texts."""

    @property
    def available(self) -> int:
        """Training tokens there are."""
        return self.train.predictions


def open_data(config: TrainConfig, tokenizer: Any, bos_id: int | None) -> TrainData:
    """Tokenize both texts and see that no validation token is trained on."""

    def blocks(corpus: Corpus, count: int | None, offset: int) -> Blocks:
        return make_blocks(corpus, tokenizer, size=config.block_size, count=count, bos_id=bos_id, offset=offset)

    source, valid_source = _train_corpus(config), _valid_corpus(config)
    if valid_source is not None:
        train = blocks(source, config.blocks, config.offset)
        valid = blocks(valid_source, config.valid_blocks, config.valid_offset or 0)
        _check_apart(source, valid_source, train, valid)
    else:
        valid_source = source
        behind = None if config.blocks is None else config.offset + config.blocks
        start = config.valid_offset if config.valid_offset is not None else behind
        # One pass over the text serves both: a stream cannot be read twice.
        needed = None if start is None or behind is None else max(start + config.valid_blocks, behind)
        whole = blocks(source, needed, 0)
        if start is None:
            start = whole.count - config.valid_blocks
        stop = behind if behind is not None else start if start > config.offset else whole.count
        if stop <= config.offset:
            raise CorpusError(
                f"the text {source.name!r} has {whole.count} blocks of {config.block_size}, which leaves none to train on "
                f"besides {config.valid_blocks} for validation: use fewer `valid_blocks` or a longer text."
            )
        train, valid = _part(whole, config.offset, stop), _part(whole, start, start + config.valid_blocks)
        _check_apart(source, source, train, valid)
    provenance = {
        "train": _describe(source, train),
        "valid": _describe(valid_source, valid),
    }
    return TrainData(train, valid, provenance)


def _train_corpus(config: TrainConfig) -> Corpus:
    if not config.texts and config.corpus == WIKITEXT:
        # By that name an audit reads the validation split, which is what these runs are judged on.
        return Corpus(WIKITEXT, wikitext_rows("train"), "", {"dataset": WIKITEXT_DATASET[0], "split": "train"})
    return open_corpus(config.texts, config.corpus, config.text_field)


def _valid_corpus(config: TrainConfig) -> Corpus | None:
    if config.valid_texts:
        return open_corpus(config.valid_texts, None, config.text_field)
    return open_corpus((), WIKITEXT) if not config.texts and config.corpus == WIKITEXT else None


def wikitext_rows(split: str) -> Iterator[str]:
    """The lines of a split of WikiText-103 (raw), streamed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("datasets", "the corpus wikitext-103", "train") from error
    try:
        for row in load_dataset(*WIKITEXT_DATASET, split=split, streaming=True):
            yield str(row["text"])
    except Exception as error:
        raise CorpusError(
            f"the {split} split of WikiText-103 could not be fetched ({first_line(error)}): "
            "pass local files as `texts` and `valid_texts` instead."
        ) from error


def training_text(config: TrainConfig) -> Corpus:
    """The documents a tokenizer is trained on."""
    return _train_corpus(config)


def _part(blocks: Blocks, start: int, stop: int) -> Blocks:
    size = blocks.size
    return Blocks(blocks.stream[start * size : stop * size + 1].clone(), size, stop - start, blocks.bos_id, start)


def _check_apart(source: Corpus, other: Corpus, train: Blocks, valid: Blocks) -> None:
    mine, theirs = ([file["sha256"] for file in c.provenance.get("files", [])] for c in (source, other))
    if source is not other and not set(mine) & set(theirs):
        return
    same = source is other or mine == theirs
    overlap = train.offset < valid.offset + valid.count and valid.offset < train.offset + train.count
    if not same or overlap:
        raise CorpusError(
            f"training blocks {train.offset}…{train.offset + train.count} and validation blocks "
            f"{valid.offset}…{valid.offset + valid.count} of {other.name!r} share text: "
            "choose disjoint offsets or other `valid_texts`."
        )


def _describe(corpus: Corpus, blocks: Blocks) -> dict[str, Any]:
    record = {"name": corpus.name, "blocks": blocks.count, "offset": blocks.offset, "tokens": blocks.predictions}
    return {**record, "fingerprint": blocks.fingerprint(), **corpus.provenance}


def batch_of(blocks: Blocks, seed: int, step: int, per_step: int) -> Tensor:
    """Indices [per_step] of the blocks of step 1, 2, …: every epoch goes through all blocks once, in an order of its own."""
    first = (step - 1) * per_step
    positions = range(first, first + per_step)
    return torch.tensor([int(_order(blocks.count, seed, p // blocks.count)[p % blocks.count]) for p in positions])


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def gather(blocks: Blocks, index_B: Tensor) -> tuple[Tensor, Tensor]:
    """Input ids [B, size (+1 with BOS)] and target ids [B, size] of the blocks with these indices."""
    position = index_B.unsqueeze(1) * blocks.size + torch.arange(blocks.size)
    inputs, targets = blocks.stream[position], blocks.stream[position + 1]
    if blocks.bos_id is not None:
        inputs = torch.cat([inputs.new_full((len(index_B), 1), blocks.bos_id), inputs], dim=1)
    return inputs, targets
