"""One pass over the tokens of a text: hidden states, token tables, accumulators, a batch of blocks at a time.

An audit and the validation of a run are both this pass. Progress, saving and interrupts belong to the caller, whose
function is called between batches: a batch is counted whole or not at all.

Axes: T tokens of a batch, B blocks of a batch, N positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zloss.measure.block_values import BlockValues
from zloss.measure.body_gradients import all_parameters_on
from zloss.measure.diagnostic_batch import MadeForward
from zloss.measure.graph_room import GraphRoom
from zloss.measure.hidden_source import ShapedTokens
from zloss.measure.layer_cuts import cut_forward
from zloss.measure.measurement import Measurement
from zloss.measure.tails import Tails
from zloss.measure.token_table import token_tables
from zloss.models.output_head import HiddenStates
from zloss.text import Blocks


@dataclass(frozen=True)
class KeptForwards:
    """The forward passes over the first blocks of a text, kept for the gradients that are measured on them."""

    model: nn.Module
    blocks: int
    room: GraphRoom
    """Memory for graphs of layers, which then need no recomputation."""
    made: dict[int, MadeForward] = field(default_factory=dict)
    """By their first block."""

    def hidden(self, hidden_of: HiddenStates, inputs_BN: Tensor, start: int) -> Tensor:
        """The hidden states of the blocks from `start` on; the pass that gives them is kept."""
        with all_parameters_on(self.model):
            cut = cut_forward(self.model, hidden_of, inputs_BN, self.room)
        self.made[start] = MadeForward(cut)
        return cut.hidden_BND.detach()

    def take(self, start: int, tokens: ShapedTokens) -> None:
        """Keep what the head made of tokens of the pass that begins at block `start`, if that pass is kept."""
        if start in self.made:
            self.made[start].tokens.append(tokens)


@dataclass(frozen=True)
class TokenPass:
    """A text and the model that reads it."""

    measurement: Measurement
    blocks: Blocks
    hidden_of: HiddenStates
    batch_blocks: int
    """Blocks per forward pass; the numbers depend on it by rounding only."""
    kept: KeptForwards | None = None
    """Keeps the forward passes over the first blocks; None keeps none."""

    @torch.no_grad()
    def states(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] and targets [T] of the counted predictions of blocks start..stop."""
        device = self.measurement.head.weight_VD.device
        inputs_BN = self.blocks.inputs(start, stop).to(device)
        if self.kept is not None and stop <= self.kept.blocks:
            hidden_BND = self.blocks.counted(self.kept.hidden(self.hidden_of, inputs_BN, start))
        else:
            hidden_BND = self.blocks.counted(self.hidden_of(inputs_BN))
        target_T = self.blocks.targets(start, stop).to(device).reshape(-1)
        return hidden_BND.reshape(-1, hidden_BND.shape[-1]), target_T

    @torch.no_grad()
    def run(
        self,
        tails: Tails,
        go_on: Callable[[int], bool],
        *,
        finished: int = 0,
        end: int | None = None,
        by_block: BlockValues | None = None,
    ) -> int:
        """Take every block from `finished` on into `tails`, up to `end`; where the pass stopped.

        `by_block` takes the same tokens, block by block.
        `go_on` is called after each batch with the number of blocks finished so far; False ends the pass there.
        """
        end = self.blocks.count if end is None else end
        while finished < end:
            start, stop = finished, min(self._end_of_batch(finished), end)
            hidden_TD, target_T = self.states(start, stop)
            for table in token_tables(self.measurement, hidden_TD, target_T):
                first = start * self.blocks.size + table.tokens.start
                tails.update(table, first)
                if self.kept is not None:
                    self.kept.take(start, table.shaped)
                if by_block is not None:
                    by_block.update(table, first)
            finished = stop
            if not go_on(finished):
                break
        return finished

    def _end_of_batch(self, start: int) -> int:
        """A batch also ends where the kept blocks end, so that a forward pass has only such blocks or none."""
        edge = self.kept.blocks if self.kept is not None and start < self.kept.blocks else self.blocks.count
        return min((start // self.batch_blocks + 1) * self.batch_blocks, edge)
