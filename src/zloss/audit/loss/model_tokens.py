"""Tokens of a real model on a text: its hidden states, its head, and the targets. Axes: T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zloss.console.progress import Progress, Silent
from zloss.errors import InputError
from zloss.models.checkpoint import DTYPES, Checkpoint, load_checkpoint
from zloss.models.head_check import check_head
from zloss.models.hidden_states import hidden_states
from zloss.models.output_head import OutputHead, find_head
from zloss.results.choices import DtypeName
from zloss.text.blocks import Blocks, make_blocks
from zloss.text.corpus import open_corpus

BLOCK_SIZE = 256


@dataclass(frozen=True)
class ModelTokens:
    """A loaded model and the blocks of a text it is to read."""

    checkpoint: Checkpoint
    head: OutputHead
    blocks: Blocks
    text: str
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden [T, D], target [T]) of every block, on the CPU."""
        with hidden_states(self.checkpoint, self.head) as hidden_of:
            for index in range(self.blocks.count):
                ids = self.blocks.inputs(index, index + 1).to(self.head.weight_VD.device)
                # Not around the `yield`: the loss that is audited in between needs its gradients.
                with torch.no_grad():
                    hidden = self.blocks.counted(hidden_of(ids))[0]
                yield hidden.cpu(), self.blocks.targets(index, index + 1)[0].cpu()


def open_model_tokens(
    model: str,
    *,
    texts: Sequence[str] = (),
    blocks: int = 4,
    block_size: int | None = None,
    dtype: DtypeName = "fp32",
    progress: Progress | None = None,
) -> ModelTokens:
    """Load the model, cut the text, and check that the head is understood.

    `texts` are files, by default the corpus `pydoc`; `block_size` is 256, or fewer where the model has fewer positions.
    """
    progress = progress or Silent()
    with progress.step(f"loading {model[-40:]}", None):
        checkpoint = load_checkpoint(model, dtype=dtype)
        head = find_head(checkpoint)
    bos = checkpoint.bos_id("auto")
    size = _block_size(checkpoint, block_size, bos is not None)
    with progress.step("reading text", None):
        corpus = open_corpus(texts, None)
        cut = make_blocks(corpus, checkpoint.tokenizer, size=size, count=blocks, bos_id=bos)
        check_head(checkpoint, head, cut.inputs(0, 1)[0])
    return ModelTokens(checkpoint, head, cut, corpus.name, DTYPES[dtype])


def _block_size(checkpoint: Checkpoint, asked: int | None, bos: bool) -> int:
    config: Any = checkpoint.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    most = positions - bos if isinstance(positions, int) else None
    if asked is None:
        return BLOCK_SIZE if most is None else min(BLOCK_SIZE, most)
    if most is not None and asked > most:
        raise InputError(
            f"`block_size` is {asked}, but {checkpoint.name} has {positions} positions: give at most {most}."
        )
    return asked
