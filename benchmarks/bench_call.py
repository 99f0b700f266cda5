"""Overhead of one call: forward and backward of a small head loss against eager CE + Z, interleaved in one run.

    python benchmarks/bench_call.py [--rounds 40]

At T = 64, D = 64, V = 1000 in fp32 on one thread the matrix products take about half of the time of eager CE + Z, so the
cost of Python, of the checks and of small operations shows. Every round runs each contender 25 times in a row and keeps the
fastest call; the table has the minimum over the rounds and the spread between them.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from collections.abc import Callable

import torch
from bench_head_loss import COEF, Problem, eager_ce_z
from ceilings import print_figures, ratio
from interleaved import Timing

import zloss

T, D, V = 64, 64, 1000
EAGER = "eager CE + Z"
IN_A_ROW = 25
BARS = {
    "zloss standard, light statistics": 1.2,
    "zloss standard, full statistics": 1.2,
    "zloss centered, light statistics": 1.2,
}


def contenders(problem: Problem) -> dict[str, Callable[[], None]]:
    standard, centered = zloss.StandardZLoss(COEF, target=0.0), zloss.CenteredZLoss(COEF)
    return {
        EAGER: problem.eager(eager_ce_z),
        "zloss standard, light statistics": problem.ours(standard, statistics="light"),
        "zloss standard, full statistics": problem.ours(standard),
        "zloss centered, light statistics": problem.ours(centered, statistics="light"),
    }


def fastest(run: Callable[[], None]) -> float:
    """Seconds of the fastest of several calls in a row."""
    best = float("inf")
    for _ in range(IN_A_ROW):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def python_calls(run: Callable[[], None]) -> int:
    """Functions that one call enters, those of torch included."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return sum(entry.callcount for entry in profile.getstats())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="interleaved rounds")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    runs = contenders(Problem(T, D, V))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds + 1):
        for name, run in runs.items():
            took = fastest(run)
            if round_index:  # the first round warms up
                seconds[name].append(took)
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    print(f"forward + backward, T={T} D={D} V={V} fp32, 1 thread, torch {torch.__version__}\n")
    print(f"| {'':<34} | ratio to eager | best µs | max/min | calls |\n|{'-' * 36}|--:|--:|--:|--:|")
    for name, timing in timings.items():
        share, calls = timing.best / timings[EAGER].best, python_calls(runs[name])
        print(f"| {name:<34} | {share:.2f} | {1e6 * timing.best:.0f} | {timing.spread:.2f} | {calls} |")
    print()
    met = print_figures(ratio(f"{name} / {EAGER}", timings[name], timings[EAGER], bar) for name, bar in BARS.items())
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
