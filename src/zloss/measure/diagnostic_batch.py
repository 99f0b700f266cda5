"""The batch on which gradients are measured: the first blocks of a text.

Axes: B blocks, N positions, T counted predictions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zloss.measure.hidden_source import ShapedTokens
from zloss.measure.layer_cuts import CutForward
from zloss.text import Blocks


@dataclass(frozen=True)
class MadeForward:
    """A forward pass that was made already, and what the head made of its hidden states."""

    cut: CutForward
    tokens: list[ShapedTokens] = field(default_factory=list)
    """Of all counted predictions, in order."""


@dataclass(frozen=True)
class DiagnosticBatch:
    """Token ids, targets, and which positions are counted."""

    inputs_BN: Tensor
    targets_T: Tensor
    counted: Callable[[Tensor], Tensor] = lambda hidden_BND: hidden_BND
    """Drops the positions whose prediction is not counted."""
    forward_blocks: int | None = None
    """Blocks per forward pass; None: all of them. The numbers depend on it by rounding only."""
    made: dict[int, MadeForward] = field(default_factory=dict)
    """Forward passes of `forward_blocks` blocks that were made already, by their first block; each is used once."""

    @classmethod
    def of_blocks(
        cls,
        blocks: Blocks,
        count: int,
        device: torch.device,
        forward_blocks: int | None = None,
        made: dict[int, MadeForward] | None = None,
    ) -> DiagnosticBatch:
        """The first `count` blocks."""
        inputs_BN, targets_T = blocks.inputs(0, count).to(device), blocks.targets(0, count).reshape(-1).to(device)
        return cls(inputs_BN, targets_T, blocks.counted, forward_blocks, {} if made is None else made)

    def forwards(self) -> Iterator[tuple[Tensor, MadeForward | None]]:
        """(token ids, the pass if it was made already) of every forward pass; a pass is taken out of `made`."""
        total = self.inputs_BN.shape[0]
        step = self.forward_blocks or max(1, total)
        for start in range(0, total, step):
            yield self.inputs_BN[start : start + step], self.made.pop(start, None)

    def parts(self, hidden: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden states [T, D], targets [T]) of every forward pass, from its hidden states."""
        yield from zip(hidden, torch.split(self.targets_T, [len(hidden_TD) for hidden_TD in hidden]), strict=True)

    def flat(self, hidden_BND: Tensor) -> Tensor:
        """Hidden states of the counted predictions, [T, D]."""
        hidden_BND = self.counted(hidden_BND)
        return hidden_BND.reshape(-1, hidden_BND.shape[-1])
