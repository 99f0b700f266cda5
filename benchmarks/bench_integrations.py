"""What `apply` and its telemetry cost in a training step, in ratios measured in one run.

    python benchmarks/bench_integrations.py [--quick] [--layers 2] [--rounds 5]

1. Telemetry: a step of SmolLM2 on 256 tokens (forward, backward, clipping, AdamW) with full statistics, a window of 50
   steps and a log with alerts at every step, against the same step with light statistics and no telemetry. Limit: 1.03.
2. Memory over 500 steps of a tiny model with telemetry: resident memory after the last step against that after 100 steps.
   Limit: 5 MB.
3. `apply` against the unmodified model at V = 49,152 and T = 2,048: SmolLM2's head and width with `--layers` layers, the
   loss of the model itself against CE + Z with all statistics. Limit: 0.85 of the time, a third of the peak memory beyond the
   model. Without `--quick` the time ratio of the whole SmolLM2 (30 layers) is printed as well; it has no limit, because its
   layers are the larger part of the step.

About 8 minutes on two cores; `--quick` takes 3 rounds and leaves out the whole SmolLM2.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from ceilings import Figure, print_figures, ratio
from interleaved import Timing, measure, measure_quietly
from llama import llama
from memory import status_mb

import zloss
from zloss.integrations.transformers import apply
from zloss.telemetry.alerts import AlertMonitor
from zloss.telemetry.window import StepWindow

VOCAB, TOKENS, TELEMETRY_TOKENS, WINDOW = 49_152, 2048, 256, 50
OBJECTIVE = zloss.CenteredZLoss(1e-4)


def smollm2_like(layers: int) -> Any:
    """SmolLM2's shape with some of its layers."""
    return llama(VOCAB, 576, 1536, layers, 9, 3)


class Step:
    """One training step of a model on random tokens."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model = model
        self.ids = torch.randint(model.config.vocab_size, (1, tokens + 1))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def loss_and_update(self) -> torch.Tensor:
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def forward_backward(self) -> None:
        """Without the optimizer, which is the same for both sides."""
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None


def with_telemetry(step: Step) -> Callable[[], None]:
    """The step with a window and a log at its end; the hooks are on the model only while it runs."""
    window, monitor = StepWindow(WINDOW, OBJECTIVE.coordinate), AlertMonitor(window=5, lag=5, warmup=0)
    count = 0

    def run() -> None:
        nonlocal count
        with apply(step.model, OBJECTIVE) as handle:
            handle.observers.append(window.add)
            norm = step.loss_and_update()
            window.end_step(norm, 1.0)
            scalars, last = window.both()
            count += 1
            monitor.observe(count, last)
            assert scalars

    return run


def without_telemetry(step: Step) -> Callable[[], None]:
    def run() -> None:
        with apply(step.model, OBJECTIVE, statistics="light"):
            step.loss_and_update()

    return run


def applied(step: Step) -> Callable[[], None]:
    def run() -> None:
        with apply(step.model, OBJECTIVE):
            step.forward_backward()

    return run


def timed(contenders: dict[str, Callable[[], object]], reference: str, rounds: int, quick: bool) -> dict[str, Timing]:
    if quick:
        return measure(contenders, rounds=rounds)
    return measure_quietly(contenders, reference=reference, rounds=rounds)


def telemetry_cost(rounds: int, quick: bool) -> bool:
    step = Step(smollm2_like(30), TELEMETRY_TOKENS)
    plain, full = without_telemetry(step), with_telemetry(step)
    times = timed({"plain": plain, "telemetry": full}, "plain", rounds, quick)
    print(
        f"SmolLM2, {TELEMETRY_TOKENS} tokens: {times['plain'].best:.2f} s a step, max/min {times['plain'].spread:.2f}"
    )
    return print_figures(
        [ratio("step with telemetry and a log / step without", times["telemetry"], times["plain"], 1.03)]
    )


def memory_over_steps(steps: int = 500, settle: int = 100) -> bool:
    run = with_telemetry(Step(llama(256, 32, 64, 1, 2, 2, tied=False), 64))
    before = 0.0
    for number in range(1, steps + 1):
        run()
        if number == settle:
            before = resident_mb()
    growth = resident_mb() - before
    return print_figures([Figure(f"growth of memory from step {settle} to step {steps}", growth, 5.0, unit="MB")])


def apply_cost(layers: int, rounds: int, quick: bool, *, limit: float | None) -> bool:
    step = Step(smollm2_like(layers), TOKENS)
    times = timed({"unmodified": step.forward_backward, "applied": applied(step)}, "unmodified", rounds, quick)
    print(f"V = {VOCAB:,}, T = {TOKENS:,}, {layers} layers: unmodified {times['unmodified'].best:.2f} s, "
          f"max/min {times['unmodified'].spread:.2f}")  # fmt: skip
    figure = ratio(
        f"step with apply / unmodified, {layers} layers", times["applied"], times["unmodified"], limit or 1.0
    )
    if limit is None:
        print(f"{figure.name}: {figure.value:.3f}, noise {100 * figure.noise:.1f} %")
        return True
    return print_figures([figure])


def apply_memory(layers: int) -> bool:
    """Peak memory of one step beyond model and gradients, each side in a separate process."""
    extra = {}
    for kind in ("unmodified", "applied"):
        words = [sys.executable, __file__, "--child", kind, "--layers", str(layers)]
        extra[kind] = float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])
        print(f"peak memory of a step beyond the model, {kind}, {layers} layers: {extra[kind]:.0f} MB", flush=True)
    return print_figures([Figure("peak memory with apply / unmodified", extra["applied"] / extra["unmodified"], 1 / 3)])


def child(kind: str, layers: int) -> None:
    step = Step(smollm2_like(layers), TOKENS)
    run = step.forward_backward if kind == "unmodified" else applied(step)
    whole, step.ids = step.ids, step.ids[:, :9]
    run()  # gradients and kernels are there before the peak is read
    before = status_mb("VmHWM")
    step.ids = whole
    run()
    print(status_mb("VmHWM") - before)


def resident_mb() -> float:
    gc.collect()
    return status_mb("VmRSS")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model of the third part")
    parser.add_argument("--quick", action="store_true", help="3 rounds, without the whole SmolLM2 in the third part")
    parser.add_argument("--child", metavar="KIND", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.layers)
        return 0
    rounds = 3 if given.quick else given.rounds
    met = [telemetry_cost(rounds, given.quick), memory_over_steps()]
    met += [apply_cost(given.layers, rounds, given.quick, limit=0.85), apply_memory(given.layers)]
    if not given.quick:
        apply_cost(30, min(rounds, 3), True, limit=None)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
