"""Cost of the router loss and its bookkeeping, as a share of one training step of the 8-expert model.

All figures are from one interleaved run:

- `step`: a step of `zloss train --moe` as it would be without anything about routers but the model's own balancing loss
  (forward, fused head, backward, clipping, AdamW);
- `step, booked`: the same with the router Z-loss by the written reduction, the routing record and the telemetry;
- `bookkeeping alone`: what the second adds, on captured router logits (forward and backward at the logits);
- `attached loss alone`: `zloss.router_loss` with every statistic read, as `attach_router_loss` computes it.

The last two are the steadier ones: a cost of a percent drowns in the noise of whole steps.

    python benchmarks/bench_router.py
"""

from __future__ import annotations

import argparse
import sys

import torch
from ceilings import print_figures, ratio
from interleaved import measure_quietly

from zloss.head.loss import HeadLossOutput
from zloss.models.checkpoint import Checkpoint
from zloss.objectives import CrossEntropy
from zloss.results.run_config import MoeRun
from zloss.router.loss import RouterLoss, router_loss
from zloss.train.loss import LossModel
from zloss.train.moe import (
    Routing,
    RoutingTap,
    build_moe,
    load_balancing,
    router_numbers,
    router_terms,
)

TOKENS, BLOCK_SIZE, VOCAB, TOP_K = 1024, 256, 8192, 4
LIMIT = 0.03
CLIP = 1.0


def read_all(out: RouterLoss) -> list[float]:
    """Every statistic of the record, as a training log would take it."""
    assert out.correction_norm is not None
    scalars = (out.loss.detach(), out.entropy, out.load_cv, out.correction_norm)
    return [*map(float, scalars), out.relative, out.absolute, float(out.nonfinite)]


class Step:
    """The model with its optimizer and one batch."""

    def __init__(self) -> None:
        self.moe = MoeRun(top_k=TOP_K, router="active_route_sum", router_coef=1e-3)
        self.model = build_moe(self.moe, vocab=VOCAB, positions=BLOCK_SIZE, seed=0).train()
        checkpoint = Checkpoint("bench", "config", self.model, None, wants_bos=False)
        self.head = LossModel(checkpoint, CrossEntropy(), "fused", lambda hidden: hidden)
        self.booked_model = LossModel(checkpoint, CrossEntropy(), "fused", lambda hidden: hidden, self.moe)
        self.tap = RoutingTap(self.model, lambda hidden: hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        shape = (TOKENS // BLOCK_SIZE, BLOCK_SIZE)
        self.ids, self.targets = (torch.randint(VOCAB, shape, generator=generator) for _ in range(2))
        with torch.no_grad():
            _, found = self._observed()
        self.routing = Routing(tuple(layer.clone().requires_grad_() for layer in found.logits), found.chosen)
        self.weights = self.tap.weights(self.moe.experts)

    def plain(self) -> None:
        """The balancing term belongs to the model, so both steps have it."""
        out, routing = self._observed()
        balance = load_balancing(routing, self.moe)
        (out.loss + self.moe.load_balance * balance).backward()
        self._finish()

    def booked(self) -> None:
        """As `zloss train --moe` takes it."""
        out, terms = self.booked_model(self.ids, self.targets, TOKENS)
        out.loss.backward()
        router_numbers([terms], self.moe, TOKENS)
        self._finish()

    def bookkeeping(self) -> None:
        """Router Z-loss, record and telemetry of one step."""
        _, router_z, terms = router_terms(self.routing, self.moe, TOKENS, self.weights)
        router_z.backward()
        router_numbers([terms], self.moe, TOKENS)

    def attached(self) -> None:
        """The factor form with all statistics, as in a user's own loop."""
        out = router_loss(
            self.routing.logits, coef=1e-3, convention="token_layer_mean", top_k=TOP_K, weight=self.weights
        )
        out.loss.backward()
        read_all(out)

    def _observed(self) -> tuple[HeadLossOutput, Routing]:
        (out, _), routing = self.tap.observe(lambda: self.head(self.ids, self.targets, TOKENS), len(self.ids))
        return out, routing

    def _finish(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)

    step = Step()
    contenders = {
        "step": step.plain,
        "step, booked": step.booked,
        "bookkeeping alone": step.bookkeeping,
        "attached loss alone": step.attached,
    }
    timings = measure_quietly(contenders, reference="step", rounds=options.rounds)
    base = timings["step"].best
    print(
        f"T = {TOKENS}, V = {VOCAB}, E = {step.moe.experts}, k = {TOP_K}, {torch.get_num_threads()} threads, "
        f"{sum(p.numel() for p in step.model.parameters()) / 1e6:.1f} M parameters"
    )
    for name, timing in timings.items():
        print(
            f"{name:20s} {1e3 * timing.best:9.2f} ms   {timing.best / base:7.4f} of a step   max/min {timing.spread:.2f}"
        )
    alone = ("bookkeeping alone", "attached loss alone")
    met = print_figures([ratio(f"{name} / a step", timings[name], timings["step"], LIMIT) for name in alone])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
