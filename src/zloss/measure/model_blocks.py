"""The blocks of a text for one model: as long as its positions allow, of tokens that its embedding has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zloss.errors import CheckpointError, InputError
from zloss.models.checkpoint import Checkpoint, resolve_block_size
from zloss.results.choices import BosPolicy
from zloss.text import Blocks, Corpus, make_blocks


@dataclass(frozen=True)
class ModelBlocks:
    """Blocks, and sentences for the report on how they were cut."""

    blocks: Blocks
    notes: tuple[str, ...]


def model_blocks(
    checkpoint: Checkpoint,
    corpus: Corpus,
    *,
    size: int | None,
    count: int | None,
    bos: BosPolicy = "auto",
    offset: int = 0,
) -> ModelBlocks:
    """The first `count` blocks after `offset`, or all; `size` None is the smaller of 256 and what the model has."""
    for name, value in (("blocks", count), ("block_size", size)):
        if value is not None and value < 1:
            raise InputError(f"`{name}` is expected to be a whole number ≥ 1, but got {value}.")
    bos_id = checkpoint.bos_id(bos)
    block_size = resolve_block_size(checkpoint, size, bos=bos_id is not None)
    blocks = make_blocks(corpus, checkpoint.tokenizer, size=block_size.size, count=count, bos_id=bos_id, offset=offset)
    check_token_ids(checkpoint, blocks)
    return ModelBlocks(blocks, (block_size.note,) if block_size.note else ())


def check_token_ids(checkpoint: Checkpoint, *texts: Blocks) -> None:
    """An error where the tokenizer gives an id for which the input embedding has no row."""
    model: Any = checkpoint.model
    rows = model.get_input_embeddings().weight.shape[0]
    for blocks in texts:
        largest = max(int(blocks.stream.max()), blocks.bos_id or 0)
        if largest >= rows:
            raise CheckpointError(
                f"the tokenizer of {checkpoint.name} gives the token id {largest}, but the input embedding has {rows} "
                "rows: put the tokenizer files that belong to these weights beside them."
            )
