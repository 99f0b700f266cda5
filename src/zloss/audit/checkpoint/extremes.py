"""The most extreme tokens in their context, as text."""

from __future__ import annotations

import math
from typing import Any

from zloss.measure.tail_table import EXTREMES
from zloss.measure.tails import TOP_FLOATS, Tails
from zloss.results.figure_data import ExtremeTable, ExtremeToken
from zloss.text.blocks import Blocks

CONTEXT_TOKENS = 16
"""Tokens of context shown with an extreme token, its last input included."""


def extreme_tables(tails: Tails, blocks: Blocks, tokenizer: Any) -> tuple[ExtremeTable, ...]:
    """Tables by |log Z − c| and by gain, for each coordinate that exists."""
    return tuple(
        ExtremeTable(quantity, coordinate, _tokens(tails.top(coordinate, quantity), blocks, tokenizer))
        for quantity in EXTREMES
        for coordinate in tails.coordinates
    )


def _tokens(found: list[dict[str, int | float]], blocks: Blocks, tokenizer: Any) -> tuple[ExtremeToken, ...]:
    return tuple(_token(token, blocks, tokenizer) for token in found)


def _token(found: dict[str, int | float], blocks: Blocks, tokenizer: Any) -> ExtremeToken:
    index = int(found["position"])
    block, position = divmod(index, blocks.size)
    # The context does not reach into the block before, which the model does not see.
    start = max(block * blocks.size, index + 1 - CONTEXT_TOKENS)
    return ExtremeToken(
        block=block + blocks.offset,
        position=position,
        target=_text(blocks.stream[index + 1 : index + 2].tolist(), tokenizer),
        context=_text(blocks.stream[start : index + 1].tolist(), tokenizer),
        **{name: _finite(found[name]) for name in TOP_FLOATS},
    )


def _text(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
