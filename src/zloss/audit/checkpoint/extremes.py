"""The most extreme tokens in their context, as text."""

from __future__ import annotations

import math
from typing import Any

from zloss.measure.tails import Tails
from zloss.results.figure_data import ExtremeTable, ExtremeToken
from zloss.text.blocks import Blocks

CONTEXT_TOKENS = 16


def extreme_tables(tails: Tails, blocks: Blocks, tokenizer: Any) -> tuple[ExtremeTable, ...]:
    """Tables by |log Z − c| and by gain, for each coordinate that exists."""
    return tuple(
        ExtremeTable(quantity, side, tuple(_token(row, blocks, tokenizer) for row in tails.top(side, quantity)))
        for quantity in ("violation", "gain")
        for side in tails.sides
    )


def _token(row: dict[str, int | float], blocks: Blocks, tokenizer: Any) -> ExtremeToken:
    index = int(row["position"])
    block, position = divmod(index, blocks.size)
    # The model sees nothing before its block.
    start = max(block * blocks.size, index + 1 - CONTEXT_TOKENS)
    return ExtremeToken(
        block=block + blocks.offset,
        position=position,
        target=_text(blocks.stream[index + 1 : index + 2].tolist(), tokenizer),
        context=_text(blocks.stream[start : index + 1].tolist(), tokenizer),
        **{name: _finite(row[name]) for name in ("log_z", "log_z_centered", "mu", "gain", "gain_centered", "ce")},
    )


def _text(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
