"""`zloss demo`: the head loss on one small head, all objectives side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

Count = Annotated[int, tyro.conf.arg(metavar="NUMBER")]


@dataclass(frozen=True)
class Demo:
    """Train-step quantities of every objective on a seeded random head whose rows share a large mean."""

    tokens: Count = 256
    """Number of tokens T."""
    width: Count = 64
    """Hidden width D."""
    vocab: Count = 4096
    """Vocabulary size V."""
    coef: float = 1e-3
    """λ of the auxiliary losses."""
    seed: Count = 0
    """Seed of the random head, hidden states and targets."""

    def run(self) -> int:
        import torch
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        import zloss
        from zloss.objectives import objective_names
        from zloss.report.terminal.fitting import print_sentence, print_table

        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.tokens, self.width, generator=generator, requires_grad=True)
        # A shared row mean gives the head a common shift that cross-entropy cannot see and Z-loss can.
        rows = torch.randn(self.vocab, self.width, generator=generator) + torch.randn(self.width, generator=generator)
        weight = (0.3 * rows).requires_grad_()
        target = torch.randint(self.vocab, (self.tokens,), generator=generator)

        title = f"CE + Z on a random head (T={self.tokens}, D={self.width}, V={self.vocab}, λ={self.coef:g})"
        table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("objective", "loss", "CE", "auxiliary", "‖dh‖", "‖dW‖", "p99 |μ|", "p99 A_p"):
            table.add_column(column, justify="left" if column == "objective" else "right", no_wrap=True)
        for name in objective_names():
            out = zloss.head_loss(hidden, weight, target, zloss.make_objective(name, self.coef))
            grad_hidden, grad_weight = torch.autograd.grad(out.loss, (hidden, weight))
            mu, gain = out.stats.mu, out.stats.gain
            assert mu is not None
            assert gain is not None
            numbers = (
                out.loss.detach(),
                out.cross_entropy,
                out.auxiliary,
                grad_hidden.norm(),
                grad_weight.norm(),
                mu.abs().quantile(0.99),
                gain.quantile(0.99),
            )
            table.add_row(name, *(f"{float(number):.5g}" for number in numbers))
        console = Console(markup=False)
        print_table(console, table)
        legend = {
            "loss, CE, auxiliary": "means over tokens, in nat",
            "‖dh‖, ‖dW‖": "norms of the gradients of hidden states and head",
            "p99 |μ|": "tail of the mean logit over tokens, in nat",
            "p99 A_p": "tail of the gain ‖Wᵀp‖/‖p‖ over tokens",
        }
        for name, meaning in legend.items():
            print_sentence(console, meaning, first=f"{name}: ")
        return 0
