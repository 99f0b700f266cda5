"""Cost of recording a training step, and of the fused head against eager CE+Z, as ratios measured interleaved in one run.

    python benchmarks/bench_train_step.py            # about two minutes on 2 cores
    python benchmarks/bench_train_step.py --quick    # fewer rounds, no memory section

One optimizer step (forward, backward, clipping, AdamW) of a Llama of 14 M parameters at V = 16384 on 4 blocks of 256 tokens,
fp32. "recorded" reads every gradient and parameter norm, and the tails of P_Z, A_p and μ over the step's tokens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ceilings import Figure, print_figures, ratio
from interleaved import Timing, measure, measure_quietly
from llama import llama
from memory import status_mb

import zloss
from zloss.models.checkpoint import Checkpoint
from zloss.optimizer.recorder import Recorder
from zloss.telemetry.window import StepWindow, micro_batch
from zloss.train.loss import LossModel

VOCAB, BLOCKS, SIZE, COEF, CLIP = 16384, 4, 256, 1e-4, 1.0
PLAIN, RECORDED, EAGER = "head_loss, light statistics", "head_loss, recorded with telemetry", "eager CE+Z"


class Step:
    """A model with its optimizer and one batch."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.model: Any = llama(VOCAB, 320, 864, 7, 5, 5)
        self.objective = zloss.CenteredZLoss(COEF)
        checkpoint = Checkpoint("bench", "config", self.model, None, wants_bos=False)
        self.loss_model = LossModel(checkpoint, self.objective, "fused", lambda hidden: hidden)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
        self.ids = torch.randint(VOCAB, (blocks, SIZE))
        self.target = torch.randint(VOCAB, (blocks, SIZE))

    def plain(self) -> None:
        """What a loop without any measurement does."""
        hidden = self.model.model(input_ids=self.ids).last_hidden_state
        zloss.head_loss(
            hidden, self.model.lm_head.weight, self.target, self.objective, statistics="light"
        ).loss.backward()
        self._finish()

    def eager(self) -> None:
        """Materialized logits, torch's own cross-entropy, and the penalty on their log-normalizer."""
        logits = self.model(input_ids=self.ids).logits
        flat = logits.reshape(-1, VOCAB)
        penalty = (torch.logsumexp(flat, dim=-1) - flat.mean(dim=-1)).square().mean()
        (F.cross_entropy(flat, self.target.reshape(-1)) + COEF * penalty).backward()
        self._finish()

    def _finish(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recorded(self) -> Callable[[], None]:
        """The step of `zloss train`."""
        recorder = Recorder(self.model.parameters(), self.optimizer, clip=CLIP)
        window = StepWindow(1, self.objective.coordinate, across_ranks=True)

        def run() -> None:
            out, _ = self.loss_model(self.ids, self.target, self.target.numel())
            out.loss.backward()
            recorder.micro_batch(out.loss, out.cross_entropy, out.auxiliary)
            with recorder.step(len(recorder.records) + 1) as step:
                window.add(micro_batch(out, "mean"))
                window.end_step(step.norm, CLIP)
                step.telemetry = window.step_tails()
                step.clip_()
                self.optimizer.step()
            self.optimizer.zero_grad()

        return run


def print_table(timings: dict[str, Timing]) -> bool:
    plain, recorded, eager = (timings[name] for name in (PLAIN, RECORDED, EAGER))
    print(
        f"\none step, {BLOCKS * SIZE} tokens, V={VOCAB}, fp32, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print(f"| {'':<36} | best ms | max/min |\n|{'-' * 38}|--------:|--------:|")
    for name, timing in timings.items():
        print(f"| {name:<36} | {1e3 * timing.best:7.0f} | {timing.spread:7.2f} |")
    print()
    return print_figures(
        [
            ratio("recorder and telemetry: recorded / plain step", recorded, plain, 1.05),
            ratio("recorded step / eager CE+Z step", recorded, eager, 1.0),
        ]
    )


def print_memory() -> bool:
    """Peak memory of one step beyond model, gradients and Adam state, each contender in a separate process."""
    extra = {kind: _in_process(kind) for kind in ("recorded", "eager")}
    for kind, megabytes in extra.items():
        print(f"peak extra memory of a step, {kind:<40} {megabytes:6.0f} MB")
    return print_figures([Figure("peak extra memory, recorded / eager", extra["recorded"] / extra["eager"], 1.0)])


def _in_process(kind: str) -> float:
    words = [sys.executable, __file__, "--child", kind]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def child(kind: str) -> None:
    step = Step()
    run = step.recorded() if kind == "recorded" else step.eager
    whole_ids, whole_target = step.ids, step.target
    # A step on very few tokens allocates gradients, Adam state and kernels, so that the peak after it is that of the batch.
    step.ids, step.target = whole_ids[:1, :8], whole_target[:1, :8]
    run()
    before = status_mb("VmHWM")
    step.ids, step.target = whole_ids, whole_target
    run()
    print(status_mb("VmHWM") - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repetitions")
    parser.add_argument("--quick", action="store_true", help="3 rounds, no memory section")
    parser.add_argument("--child", metavar="KIND", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return 0
    step = Step()
    contenders = {PLAIN: step.plain, RECORDED: step.recorded(), EAGER: step.eager}
    if arguments.quick:
        return 0 if print_table(measure(contenders, rounds=3)) else 1
    met = print_table(measure_quietly(contenders, reference=PLAIN, rounds=arguments.rounds))
    return 0 if print_memory() and met else 1


if __name__ == "__main__":
    sys.exit(main())
