"""The training and validation blocks of a run, cut from one text or two; no block is in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zloss.errors import CorpusError, InputError
from zloss.results.run_config import RunData, TextPart
from zloss.results.train_config import TrainConfig
from zloss.text import WIKITEXT, Blocks, Corpus, make_blocks, open_corpus, wikitext


@dataclass(frozen=True)
class TrainData:
    """Both texts of a run, tokenized."""

    train: Blocks
    valid: Blocks
    identity: RunData
    """Names, checksums and token counts of both texts, as config.json holds them."""

    @property
    def available(self) -> int:
        """Predictions in the training blocks."""
        return self.train.predictions


def open_data(config: TrainConfig, tokenizer: Any, bos_id: int | None) -> TrainData:
    """Tokenize both texts, and refuse blocks that would be trained on and validated on."""

    size = config.block_size
    if size is None:
        raise InputError("`block_size` is expected to be a number here: the model decides it where none is asked for.")

    def blocks(corpus: Corpus, count: int | None, offset: int) -> Blocks:
        return make_blocks(corpus, tokenizer, size=size, count=count, bos_id=bos_id, offset=offset)

    source, valid_source = training_text(config), _validation_text(config)
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
            start = stop = whole.count - config.valid_blocks  # the last blocks are kept for validation
        else:
            stop = behind if behind is not None else start if start > config.offset else whole.count
        if stop <= config.offset:
            raise CorpusError(
                f"the text {source.name!r} has {whole.count} blocks of {config.block_size}, which leaves none to train on "
                f"besides {config.valid_blocks} for validation: use fewer `valid_blocks` or a longer text."
            )
        train, valid = _part(whole, config.offset, stop), _part(whole, start, start + config.valid_blocks)
        _check_apart(source, source, train, valid)
    return TrainData(train, valid, RunData(_identity(source, train), _identity(valid_source, valid)))


def training_text(config: TrainConfig) -> Corpus:
    """The documents to train on, a new iterator at every call; a tokenizer is trained on them too."""
    # By the name of WikiText an audit reads the validation split, which is what these runs are judged on.
    return wikitext("train") if _named_wikitext(config) else open_corpus(config.texts, config.corpus, config.text_field)


def _validation_text(config: TrainConfig) -> Corpus | None:
    """The documents to validate on; None where they come from the training text."""
    if config.valid_texts:
        return open_corpus(config.valid_texts, None, config.text_field)
    return wikitext("validation") if _named_wikitext(config) else None


def _named_wikitext(config: TrainConfig) -> bool:
    return not config.texts and config.corpus == WIKITEXT


def _part(blocks: Blocks, start: int, stop: int) -> Blocks:
    """Blocks `start` … `stop` − 1."""
    size = blocks.size
    return Blocks(blocks.stream[start * size : stop * size + 1].clone(), size, stop - start, blocks.bos_id, start)


def _check_apart(source: Corpus, other: Corpus, train: Blocks, valid: Blocks) -> None:
    """Refuse validation blocks that are trained on: the same blocks of one text, or two lists of files that share one."""
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


def _identity(corpus: Corpus, blocks: Blocks) -> TextPart:
    """What identifies the blocks of a text."""
    return TextPart(
        name=corpus.name,
        blocks=blocks.count,
        offset=blocks.offset,
        tokens=blocks.predictions,
        fingerprint=blocks.fingerprint(),
        extra=corpus.provenance,
    )
