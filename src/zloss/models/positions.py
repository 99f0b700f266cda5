"""How many tokens a model can read at once, and the block size that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from zloss.errors import InputError
from zloss.models.checkpoint import Checkpoint

DEFAULT_BLOCK_SIZE = 256
"""Predictions per block where none are asked for and the model has positions for them."""
TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
"""Names under which models keep a table with one row per position."""


@dataclass(frozen=True)
class Positions:
    """The positions that a model was made for."""

    count: int
    fixed: bool
    """Whether they are rows of a table, beyond which the model cannot read. Rotary positions go on without an end, but
    the model was not trained there."""


@dataclass(frozen=True)
class BlockSize:
    """Predictions per block, and a sentence for the report where the positions of the model have a say in it."""

    size: int
    note: str | None = None


def positions_of(checkpoint: Checkpoint) -> Positions | None:
    """The positions by the model's config; None for a model without any, such as one with ALiBi or a recurrent one."""
    config: Any = checkpoint.config.get_text_config()
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    rows = _table_rows(checkpoint.model)
    if not isinstance(stated, int) or stated < 1:
        return None if rows is None else Positions(rows, fixed=True)
    # A table may have more rows than positions (OPT reserves two), but not fewer that could be read.
    return Positions(stated if rows is None else min(stated, rows), fixed=rows is not None)


def settle_block_size(checkpoint: Checkpoint, asked: int | None, *, bos: bool) -> BlockSize:
    """The block size that was asked for, or the smaller of 256 and what the model has positions for.

    With `bos` one position of every block is the BOS. A size beyond a table of positions is an error that names the
    largest one that fits; beyond rotary positions it stays, with a warning as its note.
    """
    positions = positions_of(checkpoint)
    if positions is None:
        return BlockSize(DEFAULT_BLOCK_SIZE if asked is None else asked)
    most = positions.count - bos
    beside = ", one of them for the BOS" if bos else ""
    if asked is None and most >= DEFAULT_BLOCK_SIZE:
        return BlockSize(DEFAULT_BLOCK_SIZE)
    if asked is None and most >= 1:
        return BlockSize(
            most,
            f"Blocks have {most} predictions, not {DEFAULT_BLOCK_SIZE}: the model has {positions.count} positions{beside}.",
        )
    if asked is not None and asked <= most:
        return BlockSize(asked)
    if positions.fixed or asked is None:
        raise InputError(
            f"`block_size` is {asked or DEFAULT_BLOCK_SIZE}, but {checkpoint.name} has {positions.count} "
            f"positions{beside}: give at most {most}."
        )
    return BlockSize(
        asked,
        f"Warning: blocks of {asked} predictions are longer than the {positions.count} positions that the model was made "
        f"for{beside}. Its numbers beyond them are not those of the trained model; blocks of {most} would fit.",
    )


def _table_rows(model: nn.Module) -> int | None:
    """Rows of the smallest table of positions; None where there is none."""
    rows = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _last(name) in TABLES
    ]
    # GPT-J keeps the sines and cosines of its rotary positions in such a table.
    rows += [buffer.shape[0] for name, buffer in model.named_buffers() if _last(name) in TABLES and buffer.dim() == 2]
    return min(rows, default=None)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
