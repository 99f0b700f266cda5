"""One pass over the tokens of a text: hidden states, token tables, accumulators, a batch of blocks at a time.

An audit and the validation of a run are both this pass. Progress, saving and interrupts belong to the caller, whose
function is called between batches: a batch is counted whole or not at all.

Axes: T tokens of a batch, B blocks of a batch, N positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zloss.measure.measurement import Measurement
from zloss.measure.tails import Tails
from zloss.measure.token_table import token_tables
from zloss.models.hidden_states import HiddenStates
from zloss.text.blocks import Blocks


@dataclass(frozen=True)
class TokenPass:
    """A text and the model that reads it."""

    measurement: Measurement
    blocks: Blocks
    hidden_of: HiddenStates
    batch_blocks: int
    """Blocks per forward pass; the numbers depend on it by rounding only."""

    @torch.no_grad()
    def states(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] and targets [T] of the counted predictions of blocks start..stop."""
        device = self.measurement.head.weight_VD.device
        hidden_BND = self.blocks.counted(self.hidden_of(self.blocks.inputs(start, stop).to(device)))
        target_T = self.blocks.targets(start, stop).to(device).reshape(-1)
        return hidden_BND.reshape(-1, hidden_BND.shape[-1]), target_T

    @torch.no_grad()
    def run(
        self,
        tails: Tails,
        go_on: Callable[[int], bool],
        *,
        finished: int = 0,
        plane_2D: Tensor | None = None,
    ) -> int:
        """Take every block after the first `finished` ones into `tails`; the number of blocks finished at the end.

        `go_on` is called after each batch with the number of blocks finished so far; False ends the pass there.
        """
        while finished < self.blocks.count:
            start, stop = finished, min(finished + self.batch_blocks, self.blocks.count)
            hidden_TD, target_T = self.states(start, stop)
            for table in token_tables(self.measurement, hidden_TD, target_T, plane_2D):
                tails.update(table, start * self.blocks.size + table.tokens.start)
            finished = stop
            if not go_on(finished):
                break
        return finished
