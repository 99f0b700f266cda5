"""A model small enough to differentiate many times: routers between layers that feed one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

T, D, E = 30, 6, 5


class TinyMoe(nn.Module):
    """Each layer routes its input softly over E linear experts; a router also moves what later routers see."""

    def __init__(self, layers: int, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))

        self.routers = nn.ParameterList([weight(E, D) for _ in range(layers)])
        self.experts = nn.ParameterList([weight(E, D, D) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.inputs = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)

    def forward(self) -> tuple[Tensor, Sequence[Tensor]]:
        """A main loss and the router logits of every layer."""
        hidden, logits = self.inputs, []
        for router, experts in zip(self.routers, self.experts, strict=True):
            logits.append(self.dropout(hidden) @ router.T)
            outputs = torch.einsum("td,edf->tef", hidden, experts)
            mixed = (logits[-1].softmax(dim=-1).unsqueeze(-1) * outputs).sum(dim=1)
            hidden = torch.tanh(hidden + 0.5 * mixed)
        return hidden.square().mean(), logits
