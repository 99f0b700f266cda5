"""Changes to the output head before a run starts: a table of its own, and a common shift of a given size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zloss.errors import InputError
from zloss.head.centering import shift_head_
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import OutputHead, find_head, hidden_states
from zloss.text import Blocks
from zloss.train.data.batch import gather

SHIFT_BLOCKS = 4
"""Training blocks on which the size of a head shift is measured."""


def untie_head_(checkpoint: Checkpoint) -> None:
    """Give the output head a table of its own with the same entries; an untied head stays as it is."""
    head = find_head(checkpoint)
    if head.tied:
        module: Any = head.module
        module.weight = nn.Parameter(head.weight_VD.detach().clone())
        checkpoint.config.tie_word_embeddings = False


@torch.no_grad()
def shift_head_to_(checkpoint: Checkpoint, blocks: Blocks, size: float) -> None:
    """Add s·ū/‖ū‖² to every row, ū the mean hidden state, with s such that p99 |μ| comes out as `size`."""
    head = find_head(checkpoint)
    if not isinstance(head.module, nn.Linear):
        raise InputError(
            f"`head_shift` needs an nn.Linear output head, but {checkpoint.name} has {type(head.module).__name__}."
        )
    hidden_TD = _hidden(checkpoint, head, blocks).double()
    mean_D = hidden_TD.mean(dim=0)
    direction_D = mean_D / mean_D.square().sum()
    along_T = hidden_TD @ direction_D * head.logit_scale
    shift = (size / float(along_T.abs().quantile(0.99))) * direction_D
    shift_head_(head.module, shift, model=checkpoint.model)


def _hidden(checkpoint: Checkpoint, head: OutputHead, blocks: Blocks) -> Tensor:
    """Hidden states [T, D] of the first blocks."""
    inputs, _ = gather(blocks, torch.arange(min(SHIFT_BLOCKS, blocks.count)))
    with hidden_states(checkpoint, head) as hidden_of:
        hidden = blocks.counted(hidden_of(inputs))
    return hidden.reshape(-1, hidden.shape[-1])
