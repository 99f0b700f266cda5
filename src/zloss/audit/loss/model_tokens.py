"""Tokens of a real model on a text: its hidden states, its head, and the targets. Axes: T tokens, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.console import Progress, Silent
from zloss.measure.model_blocks import model_blocks
from zloss.models.checkpoint import DTYPES, Checkpoint, load_checkpoint
from zloss.models.output_head import OutputHead, check_head, find_head, hidden_states
from zloss.results.choices import DtypeName
from zloss.text import Blocks, open_corpus


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
        checkpoint = load_checkpoint(model, dtype=dtype, allow_pickle=None)
        head = find_head(checkpoint)
    with progress.step("reading text", None):
        corpus = open_corpus(texts, None)
        cut = model_blocks(checkpoint, corpus, size=block_size, count=blocks).blocks
        check_head(checkpoint, head, cut.inputs(0, 1)[0])
    return ModelTokens(checkpoint, head, cut, corpus.name, DTYPES[dtype])
