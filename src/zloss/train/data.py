"""Which tokens a run sees: blocks of its texts, the batch of a step, and its micro-batches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zloss.errors import CorpusError, InputError
from zloss.jobs import Job
from zloss.results.run_config import RunData, TextPart, TrainConfig
from zloss.text import WIKITEXT, Blocks, Corpus, make_blocks, open_corpus, wikitext

ALL_BLOCKS = "set `blocks` to 0 for all blocks"


@dataclass(frozen=True)
class TrainData:
    """Both texts of a run, tokenized."""

    train: Blocks
    valid: Blocks
    identity: RunData
    """Names, checksums and token counts of both texts, as config.json holds them."""


def open_data(config: TrainConfig, tokenizer: Any, bos_id: int | None) -> TrainData:
    """Tokenize both texts, cut from one text or two, and reject blocks that would be used for both training and validation."""
    size = config.block_size
    assert size is not None, "`prepare_start` sets it"

    def blocks(corpus: Corpus, count: int | None, offset: int) -> Blocks:
        fewer = ALL_BLOCKS if corpus is source else "use fewer blocks"
        return make_blocks(corpus, tokenizer, size=size, count=count, bos_id=bos_id, offset=offset, fewer=fewer)

    source = valid_source = training_text(config)
    if config.valid_texts or _named_wikitext(config):
        named = not config.valid_texts
        valid_source = wikitext("validation") if named else open_corpus(config.valid_texts, None, config.text_field)
        train = blocks(source, config.blocks, config.offset)
        valid = blocks(valid_source, config.valid_blocks, config.valid_offset or 0)
    else:
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
                f"the text {source.name!r} has {whole.count} blocks of {size}, which leaves none to train on after "
                f"setting aside {config.valid_blocks} for validation: use fewer `valid_blocks` or a longer text."
            )
        train, valid = whole.part(config.offset, stop), whole.part(start, start + config.valid_blocks)
    _check_disjoint(source, valid_source, train, valid)
    identity = RunData(text_part(train, source.provenance), text_part(valid, valid_source.provenance))
    return TrainData(train, valid, identity)


def training_text(config: TrainConfig) -> Corpus:
    """The documents to train on, a new iterator at every call; a tokenizer is trained on them too."""
    # An audit of WikiText by name reads its validation split; a run is validated on that split and trained on the other.
    return wikitext("train") if _named_wikitext(config) else open_corpus(config.texts, config.corpus, config.text_field)


def _named_wikitext(config: TrainConfig) -> bool:
    return not config.texts and config.corpus == WIKITEXT


def _check_disjoint(source: Corpus, other: Corpus, train: Blocks, valid: Blocks) -> None:
    """Reject validation blocks that are trained on: the same blocks of one text, or two lists of files that share one."""
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


def text_part(blocks: Blocks, provenance: dict[str, Any]) -> TextPart:
    """What identifies the blocks of a text."""
    return TextPart(
        name=blocks.name,
        blocks=blocks.count,
        offset=blocks.offset,
        tokens=blocks.predictions,
        fingerprint=blocks.fingerprint(),
        extra=provenance,
    )


def batch_of(blocks: Blocks, seed: int, step: int, per_step: int) -> Tensor:
    """Indices [per_step] of the blocks of step 1, 2, …: every epoch visits each block once, in a new order.

    A pure function of seed and step. No loader keeps a position: a resumed run computes the batch of its next step and gets
    what the uninterrupted run got.
    """
    places = (divmod(place, blocks.count) for place in range((step - 1) * per_step, step * per_step))
    return torch.tensor([int(_order(blocks.count, seed, epoch)[place]) for epoch, place in places])


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """The order of the blocks in one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(frozen=True)
class MicroBatch:
    """Blocks of one forward and backward pass."""

    inputs_BT: Tensor
    targets_BT: Tensor
    seed: int
    """Seed of its dropout."""


def divides_blocks(config: TrainConfig, job: Job) -> bool:
    """Whether a micro-batch is split over several ranks."""
    return config.accumulate < job.ranks


def micro_batches(config: TrainConfig, data: TrainData, step: int, job: Job | None = None) -> Iterator[MicroBatch]:
    """The micro-batches of one step that this rank of `job` computes.

    Tokens and dropout are a function of seed, step and micro-batch, the same for all methods. Several ranks divide the
    micro-batches of a step among them. If there are fewer than ranks, they divide its blocks: each rank has one pass then.
    """
    job = job or Job()
    index_B = batch_of(data.train, config.seed, step, config.blocks_per_step)
    if divides_blocks(config, job):
        local = job.local_range(config.blocks_per_step, 1)
        parts = {0: index_B[local.start : local.stop]}
    else:
        whole = index_B.view(config.accumulate, config.micro_batch)
        parts = {micro: whole[micro] for micro in job.local_range(config.accumulate, 1)}
    for micro, index in parts.items():
        digest = hashlib.sha256(f"{config.seed} {step} {micro}".encode()).digest()
        yield MicroBatch(*data.train.batch(index), seed=int.from_bytes(digest[:7], "big"))


def check_divisible(config: TrainConfig, job: Job) -> None:
    """Reject a run whose blocks cannot be divided so that it trains as on one process."""
    if config.blocks_per_step < job.ranks:
        raise InputError(
            f"a step has {config.blocks_per_step} blocks (`micro_batch` times `accumulate`), but there are {job.ranks} "
            f"processes: give every process a block."
        )
    if config.moe is not None and divides_blocks(config, job):
        raise InputError(
            "the load-balancing term is computed over a whole micro-batch, so a mixture of experts needs at least as many "
            f"micro-batches as processes: `accumulate` is {config.accumulate}, but there are {job.ranks} processes."
        )
