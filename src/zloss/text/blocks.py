"""One token stream, cut into blocks whose every prediction is counted exactly once.

Block i reads tokens [i·B, (i+1)·B) and predicts tokens [i·B+1, (i+1)·B+1): B predictions each. With a BOS each block's
input starts with one more token, the BOS, whose own prediction is not counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zloss.errors import CorpusError
from zloss.text.corpus import Corpus


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `size` predictions over `stream`, which holds count·size + 1 tokens."""

    stream: Tensor
    size: int
    count: int
    bos_id: int | None
    offset: int
    """Blocks skipped at the start of the text."""

    @property
    def predictions(self) -> int:
        return self.count * self.size

    def inputs(self, start: int, stop: int) -> Tensor:
        """Input ids [stop − start, size (+1 with BOS)] of blocks start..stop."""
        ids = self.stream[start * self.size : stop * self.size].view(stop - start, self.size)
        if self.bos_id is None:
            return ids
        return torch.cat([ids.new_full((stop - start, 1), self.bos_id), ids], dim=1)

    def targets(self, start: int, stop: int) -> Tensor:
        """Target ids [stop − start, size]."""
        return self.stream[start * self.size + 1 : stop * self.size + 1].view(stop - start, self.size)

    def counted(self, hidden: Tensor) -> Tensor:
        """[B, N, …] without the position of the BOS, whose prediction is not counted."""
        return hidden if self.bos_id is None else hidden[:, 1:]

    def fingerprint(self) -> str:
        """Identity of the tokens and of their blocks; an audit that is resumed must have the same."""
        return hashlib.sha256(self.stream.numpy().tobytes() + repr((self.size, self.bos_id)).encode()).hexdigest()[:16]


def make_blocks(
    corpus: Corpus, tokenizer: Any, *, size: int, count: int | None, bos_id: int | None, offset: int = 0
) -> Blocks:
    """The first `count` blocks after `offset`, or all there are; the error of too short a text says how many it has."""
    if size < 1 or offset < 0 or (count is not None and count < 1):
        raise CorpusError(f"blocks need a size ≥ 1, an offset ≥ 0 and a count ≥ 1, but got {size}, {offset}, {count}.")
    needed = None if count is None else (offset + count) * size + 1
    pieces: list[np.ndarray[Any, Any]] = []
    have = 0
    for piece in _token_pieces(corpus, tokenizer, needed):
        pieces.append(piece)
        have += len(piece)
        if needed is not None and have >= needed:
            break
    stream = torch.from_numpy(np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64))
    available = max(0, (len(stream) - 1) // size)
    if available < offset + (count or 1):
        raise CorpusError(
            _too_short(corpus.name, len(stream), size=size, available=available, needed=offset + (count or 1))
        )
    taken = available - offset if count is None else count
    return Blocks(stream[offset * size : (offset + taken) * size + 1].clone(), size, taken, bos_id, offset)


def _too_short(name: str, tokens: int, *, size: int, available: int, needed: int) -> str:
    """What the text has, and which of the ways out are open to it."""
    if tokens == 0:
        return f"the text {name!r} is empty: give a text with more than {size} tokens."
    has = f"the text {name!r} has {tokens} tokens, which give {available} blocks of {size}, but {needed} are needed"
    fewer = f"use fewer blocks (it has {available}), a" if available else "use a"
    return f"{has}: {fewer} smaller block size, or a longer text."


def _token_pieces(corpus: Corpus, tokenizer: Any, needed: int | None) -> Iterator[np.ndarray[Any, Any]]:
    """Token ids document by document, the separator in front of all but the first."""
    have = 0
    for index, document in enumerate(corpus.documents):
        text = document if index == 0 else corpus.separator + document
        ids = _encode(text, tokenizer, None if needed is None else needed - have)
        have += len(ids)
        yield ids


def _encode(text: str, tokenizer: Any, needed: int | None) -> np.ndarray[Any, Any]:
    """The first `needed` ids of the text, or all; a long text is tokenized only as far as needed.

    The last tokens of a tokenized prefix are left out, because the text after it could have merged with them.
    """
    margin = 256
    length = len(text) if needed is None else 8 * (needed + margin)
    while True:
        ids = tokenizer(text[:length], add_special_tokens=False, verbose=False).input_ids
        if length >= len(text):
            return np.asarray(ids, dtype=np.int64)
        if needed is not None and len(ids) >= needed + margin:
            return np.asarray(ids[:needed], dtype=np.int64)
        length *= 2
