"""Speed and memory of the chunked head loss, as ratios measured interleaved in one run.

    python benchmarks/bench_head_loss.py            # the table of the README (about 5 minutes on 2 cores)
    python benchmarks/bench_head_loss.py --quick    # fewer rounds, no growth section

Forward and backward at T=1024, D=768, V=50257, fp32. The floor is three matrix products at chunk 256 with reused
buffers: what any method that does not keep the logits has to do. Tables go to standard output, one line per timed call to
standard error.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from ceilings import print_figures, ratio
from interleaved import Timing, measure, measure_quietly, to_stderr
from memory import peak_extra_mb

import zloss
from zloss.head.options import chunk_bounds

T, D, V = 1024, 768, 50257
GEMMS = "three GEMMs, chunk 256, reused buffers"
COEF = 1e-4

OBJECTIVES = {
    "cross-entropy": zloss.CrossEntropy(),
    "centered head": zloss.CenteredHead(),
    "standard": zloss.StandardZLoss(COEF),
    "centered": zloss.CenteredZLoss(COEF),
    "factorized": zloss.FactorizedZLoss(COEF, COEF),
    "gain-aware": zloss.GainAwareZLoss(COEF),
}


class Problem:
    """Hidden states, head and targets of one size."""

    def __init__(self, tokens: int, width: int = D, vocab: int = V) -> None:
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, width, generator=g).requires_grad_()
        self.weight = (torch.randn(vocab, width, generator=g) / width**0.5).requires_grad_()
        self.target = torch.randint(vocab, (tokens,), generator=g)

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def ours(self, objective: zloss.Objective, **options: object) -> Callable[[], None]:
        def run() -> None:
            self.clear()
            zloss.head_loss(self.hidden, self.weight, self.target, objective, **options).loss.backward()  # type: ignore[arg-type]

        return run

    def eager(self, loss: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            self.clear()
            loss(self.hidden, self.weight, self.target).backward()

        return run

    def gemms(self, chunk: int = 256) -> Callable[[], None]:
        hidden, weight = self.hidden.detach(), self.weight.detach()
        logits = torch.empty(chunk, weight.shape[0])
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def run() -> None:
            for start in range(0, hidden.shape[0], chunk):
                rows = slice(start, start + chunk)
                torch.mm(hidden[rows], weight.t(), out=logits)
                torch.mm(logits, weight, out=grad_hidden[rows])
                grad_weight.addmm_(logits.t(), hidden[rows], beta=0 if start == 0 else 1)

        return run


def eager_ce_z(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    log_z = torch.logsumexp(logits, dim=-1)
    return F.cross_entropy(logits, target) + COEF * log_z.square().mean()


def torch_linear_ce(chunk: int) -> Callable[..., torch.Tensor]:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, chunking_method=None)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.linear_cross_entropy(hidden, weight, target, options=options)

    return loss


def contenders(problem: Problem) -> dict[str, Callable[[], object]]:
    rows: dict[str, Callable[[], object]] = {GEMMS: problem.gemms()}
    for chunk in (128, 256, 512, 1024):
        rows[f"zloss centered, all statistics, chunk {chunk}"] = problem.ours(OBJECTIVES["centered"], chunk_size=chunk)
    for name, objective in OBJECTIVES.items():
        rows[f"zloss {name}, default chunk"] = problem.ours(objective)
    rows["zloss centered, light statistics"] = problem.ours(OBJECTIVES["centered"], statistics="light")
    for chunk in (256, 512):
        rows[f"torch linear_cross_entropy, chunk {chunk}"] = problem.eager(torch_linear_ce(chunk))
    rows["eager CE+Z"] = problem.eager(eager_ce_z)
    rows["eager CE+Z, torch.compile"] = problem.eager(torch.compile(eager_ce_z))
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        def cut(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(hidden, weight, target, impl="torch_compile")

        rows["cut-cross-entropy, torch_compile"] = problem.eager(cut)
    return rows


def print_table(timings: dict[str, Timing]) -> None:
    floor = timings[GEMMS].best
    print(
        f"\nforward + backward, T={T} D={D} V={V} fp32, {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    print(f"| {'':<48} | ratio to GEMMs | best ms | max/min |\n|{'-' * 50}|---------------:|--------:|--------:|")
    for name, timing in timings.items():
        print(f"| {name:<48} | {timing.best / floor:14.3f} | {1e3 * timing.best:7.0f} | {timing.spread:7.2f} |")


def print_bars(timings: dict[str, Timing]) -> bool:
    """The figures a release is held to."""

    def best(*words: str) -> Timing:
        return min((t for name, t in timings.items() if all(word in name for word in words)), key=lambda t: t.best)

    ours = min(best("all statistics"), best("zloss centered, default"), key=lambda t: t.best)
    slowest = max((timings[f"zloss {name}, default chunk"] for name in OBJECTIVES), key=lambda t: t.best)
    print()
    return print_figures(
        [
            ratio("centered with all statistics / three GEMMs", ours, timings[GEMMS], 1.08),
            ratio("centered with all statistics / torch linear CE at its best", ours, best("torch linear"), 1.03),
            ratio("centered with all statistics / eager CE+Z", ours, timings["eager CE+Z"], 0.82),
            ratio("all statistics / light statistics", best("zloss centered, default"), best("light"), 1.05),
            ratio("slowest objective / plain CE", slowest, best("zloss cross-entropy"), 1.05),
        ]
    )


def print_growth() -> None:
    """Time per token and peak extra memory over T, ours against eager; each size in a separate process."""
    buffer_mb = max(stop - start for start, stop in chunk_bounds(8192, 4 * V)) * V * 4 / 2**20
    print(f"\ngrowth with T (D={D}, V={V}): extra memory is the peak beyond inputs and gradients;")
    print(f"one chunk buffer is at most {buffer_mb:.0f} MB\n")
    print("| T | zloss ms/token | zloss extra MB | eager extra MB |\n|--:|--:|--:|--:|")
    for tokens in (256, 512, 1024, 2048, 4096, 8192):
        to_stderr(f"growth: T={tokens}")
        ours = _in_process("ours", tokens)
        eager = _in_process("eager", tokens) if tokens <= 4096 else None
        eager_mb = "not run" if eager is None else f"{eager[1]:.0f}"
        print(f"| {tokens} | {ours[0]:.3f} | {ours[1]:.0f} | {eager_mb} |", flush=True)


def _in_process(kind: str, tokens: int) -> tuple[float, float]:
    words = [sys.executable, __file__, "--child", kind, str(tokens)]
    milliseconds, megabytes = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return float(milliseconds), float(megabytes)


def child(kind: str, tokens: int) -> None:
    problem, warm = Problem(tokens), Problem(8, vocab=4096)

    def work(p: Problem) -> Callable[[], None]:
        return p.ours(OBJECTIVES["centered"]) if kind == "ours" else p.eager(eager_ce_z)

    work(warm)()  # loads every kernel before the baseline is read
    run = work(problem)
    gradients_mb = 4 * (problem.hidden.numel() + problem.weight.numel()) / 2**20
    extra_mb = peak_extra_mb(run) - gradients_mb
    timing = measure({kind: run}, rounds=2)[kind]
    print(1e3 * timing.best / tokens, extra_mb)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved repetitions (at least 7 for the table)")
    parser.add_argument("--quick", action="store_true", help="3 rounds, no growth section")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "T"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], int(arguments.child[1]))
        return 0
    rounds = 3 if arguments.quick else arguments.rounds
    timings = measure_quietly(
        contenders(Problem(T)),
        reference=GEMMS,
        rounds=rounds,
        attempts=1 if arguments.quick else 3,
        progress=to_stderr,
    )
    print_table(timings)
    met = print_bars(timings)
    if not arguments.quick:
        print_growth()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
