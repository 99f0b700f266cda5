"""The validation blocks of a recorded run: from a text and a tokenizer, or from rows of token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.errors import InputError
from zloss.results.run_config import TextPart
from zloss.text import Blocks, make_blocks, open_corpus


@dataclass(frozen=True)
class NamedBlocks(Blocks):
    """Blocks of a text that has a name."""

    name: str = "token ids"


@dataclass(frozen=True)
class TokenRows(Blocks):
    """Blocks that do not follow on one another: row i is [N + 1] token ids, of which the last N are predicted.

    `stream` holds the rows one after the other.
    """

    def inputs(self, start: int, stop: int) -> Tensor:
        """Input ids [stop − start, N] of rows start..stop."""
        return self._rows(start, stop)[:, :-1]

    def targets(self, start: int, stop: int) -> Tensor:
        """Target ids [stop − start, N]."""
        return self._rows(start, stop)[:, 1:]

    def _rows(self, start: int, stop: int) -> Tensor:
        return self.stream.view(self.count, self.size + 1)[start:stop]


def validation_blocks(
    texts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    block_size: int = 256,
    blocks: int | None = 64,
    offset: int = 0,
    bos_id: int | None = None,
    text_field: str = "text",
) -> Blocks:
    """Blocks of text files as `zloss train` and `zloss audit` cut them: one token stream without special tokens.

    Block i reads tokens [i·B, (i+1)·B) and predicts tokens [i·B + 1, (i+1)·B + 1), B = `block_size`. `blocks` None takes
    all there are; `bos_id` is put in front of every block where it is given.
    """
    files = [texts] if isinstance(texts, (str, os.PathLike)) else list(texts)
    corpus = open_corpus([os.fspath(file) for file in files], None, text_field)
    made = make_blocks(corpus, tokenizer, size=block_size, count=blocks, bos_id=bos_id, offset=offset)
    return NamedBlocks(made.stream, made.size, made.count, made.bos_id, made.offset, name=corpus.name)


def as_blocks(validation: Blocks | Tensor | Sequence[Sequence[int]]) -> Blocks:
    """Blocks as they are, or rows [B, N + 1] of token ids, each one block of N predictions."""
    if isinstance(validation, Blocks):
        return validation
    try:
        rows = torch.as_tensor(validation).detach().cpu().long()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"`validation` is expected to be rows of equally many token ids ({error}).") from error
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise InputError(
            f"`validation` is expected to be token ids [B, N + 1] with B ≥ 1 and N ≥ 1, but has the shape "
            f"{list(rows.shape)}: pass `zloss.validation_blocks(file, tokenizer)` for a text."
        )
    return TokenRows(rows.reshape(-1).clone(), rows.shape[1] - 1, rows.shape[0], None, 0)


def identity(blocks: Blocks) -> TextPart:
    """What identifies the blocks, for config.json."""
    return TextPart(
        name=blocks.name if isinstance(blocks, NamedBlocks) else "token ids",
        blocks=blocks.count,
        offset=blocks.offset,
        tokens=blocks.predictions,
        fingerprint=blocks.fingerprint(),
    )
