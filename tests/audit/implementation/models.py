"""A tiny model with a text, for audits that go through a model graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny_models import save_model
from zloss.models.checkpoint import Checkpoint, load_checkpoint
from zloss.models.output_head import OutputHead, find_head
from zloss.text import Blocks, make_blocks, open_corpus


@dataclass(frozen=True)
class Case:
    checkpoint: Checkpoint
    head: OutputHead
    blocks: Blocks

    def logits(self) -> torch.Tensor:
        """The model's own logits of every counted position, [T, V], with graph."""
        ids = self.blocks.inputs(0, self.blocks.count)
        return self.blocks.counted(self.checkpoint.model(input_ids=ids, use_cache=False).logits).flatten(0, 1)

    def labels(self) -> torch.Tensor:
        return self.blocks.targets(0, self.blocks.count).flatten()


def tiny_case(kind: str, folder: Path, *, blocks: int = 2, size: int = 24, bos: bool = False) -> Case:
    checkpoint = load_checkpoint(str(save_model(kind, folder, bos=bos)))
    bos_id = checkpoint.bos_id("auto")
    made = make_blocks(open_corpus((), None), checkpoint.tokenizer, size=size, count=blocks, bos_id=bos_id)
    return Case(checkpoint, find_head(checkpoint), made)
