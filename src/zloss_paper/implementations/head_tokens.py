"""What the output head of a model receives on a text, with the labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.audit.checkpoint.config import AuditConfig
from zloss.models.output_head import OutputHead, check_head, find_head
from zloss_paper.engine.workbench import Workbench, text_blocks


@dataclass(frozen=True)
class HeadTokens:
    """Hidden states [T, D] and labels [T] of T tokens, blocks one after the other."""

    head: OutputHead
    hidden_TD: Tensor
    label_T: Tensor
    block_size: int

    @property
    def target(self) -> float:
        """c = log V of the head."""
        return math.log(self.head.vocab)

    def thinned(self, per_block: int | None) -> HeadTokens:
        """Every block reduced to `per_block` evenly spread tokens."""
        if per_block is None or per_block >= self.block_size:
            return self
        inside = torch.linspace(0, self.block_size - 1, per_block).long()
        starts = torch.arange(0, len(self.label_T), self.block_size)
        chosen = (starts.unsqueeze(1) + inside).flatten()
        return HeadTokens(self.head, self.hidden_TD[chosen], self.label_T[chosen], per_block)


def head_tokens(bench: Workbench, audit: AuditConfig) -> HeadTokens:
    """Hidden states and labels of the text, the head checked against the model's own logits."""

    def run() -> HeadTokens:
        checkpoint = bench.checkpoint(audit)
        head, blocks = find_head(checkpoint), text_blocks(audit, checkpoint)
        check_head(checkpoint, head, blocks.inputs(0, 1)[0])
        return HeadTokens(head, bench.hidden(audit), blocks.targets(0, blocks.count).flatten(), blocks.size)

    return bench.once(("tokens", audit), run)
