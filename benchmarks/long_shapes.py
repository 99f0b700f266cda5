"""The head loss in bf16 at the shapes of long contexts: `python benchmarks/bench_head_loss.py --long`.

Forward and backward at D = 2048, V = 131072 and T up to 32768, by default: bf16 operands, and fp32 masters under bf16
autocast, with reduction="mean" and "none", against torch's linear cross-entropy and eager. The C helper and the chunks are
as in every CPU loss. Two cores of a few dozen Gflop/s each need about 10 minutes for one call at T = 32768, so by default
there is one round, and every row is printed when it is measured. A row is left out where its time per token at the shape
before predicts that it would end after `--minutes`, or where it needs more memory than is free. Rows to be compared follow
one another, round by round, and the products that the ratios refer to are timed before and after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from interleaved import to_stderr
from time_shares import time_shares
from torch import Tensor

import zloss
from zloss.measure.bf16_products import working_bf16_products

LONG_TOKENS = [512, 2048, 32768]
LONG_WIDTH, LONG_VOCAB = 2048, 131072
CHUNK = 256
COEF = 1e-4
BF16 = torch.bfloat16
PRODUCTS = ("h Wᵀ", "E W", "Eᵀ(s∘h)")
GB = 2**30


@dataclass
class Problem:
    """Hidden states, head and targets of one size, as fp32 masters or in bf16."""

    hidden: Tensor
    weight: Tensor
    target: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        self.hidden.grad = self.weight.grad = None
        return self.hidden.requires_grad_(), self.weight.requires_grad_()


def make_problem(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> Problem:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).to(dtype)
    weight = torch.randn(vocab, width, generator=g).div_(width**0.5).to(dtype)
    return Problem(hidden, weight, torch.randint(vocab, (tokens,), generator=g))


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(reduction: str) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return zloss.head_loss(hidden, weight, target, zloss.CenteredZLoss(COEF), reduction=reduction).loss  # type: ignore[arg-type]

    return loss


def torch_linear(reduction: str) -> Loss:
    """torch's loss at a tuned chunk. It does not know autocast: operands are cast as F.linear would cast them."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden.to(BF16), weight.to(BF16), target, reduction=reduction, options=options)

    return loss


def eager(reduction: str) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        z = COEF * torch.logsumexp(logits, dim=-1).square()
        ce = F.cross_entropy(logits, target, reduction="none")
        return ce + z if reduction == "none" else (ce + z).mean()

    return loss


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    loss: Loss
    autocast: bool = False
    token_bytes: int = 0
    """Bytes per token and vocabulary entry that are held at once, beyond operands and gradients."""
    is_ours: bool = False

    def call(self, problem: Problem) -> None:
        hidden, weight = problem.leaves()
        with torch.autocast("cpu", BF16) if self.autocast else nullcontext():
            loss = self.loss(hidden, weight, problem.target)
        loss.sum().backward()


EAGER_BYTES = 22
"""16-bit and fp32 logits, log-probabilities, two gradients and their sum."""
OURS, TORCH = "zloss centered", "torch linear_cross_entropy"
ROWS = (
    Row(f"{OURS}, bf16", ours("mean"), is_ours=True),
    Row(f"{TORCH}, bf16", torch_linear("mean")),
    Row(f"{OURS}, bf16, reduction none", ours("none"), is_ours=True),
    Row(f"{TORCH}, bf16, reduction none", torch_linear("none")),
    Row("eager CE+Z, bf16", eager("mean"), token_bytes=EAGER_BYTES),
    Row(f"{OURS}, autocast", ours("mean"), autocast=True, is_ours=True),
    Row(f"{TORCH}, fp32 cast to bf16", torch_linear("mean"), autocast=True),
    Row("eager CE+Z, autocast", eager("mean"), autocast=True, token_bytes=EAGER_BYTES),
)
PAIRS = (
    (f"{OURS}, bf16", f"{TORCH}, bf16"),
    (f"{OURS}, bf16", "eager CE+Z, bf16"),
    (f"{OURS}, bf16, reduction none", f"{TORCH}, bf16, reduction none"),
    (f"{OURS}, autocast", f"{TORCH}, fp32 cast to bf16"),
    (f"{OURS}, autocast", "eager CE+Z, autocast"),
)


def product_seconds(width: int, vocab: int, tokens: int) -> float:
    """Three fp32 products with reused buffers, scaled from one chunk to `tokens`: what ours and torch's loss cannot avoid."""
    hidden, weight = torch.randn(CHUNK, width), torch.randn(vocab, width)
    logits, back, outer = torch.zeros(CHUNK, vocab), torch.zeros(CHUNK, width), torch.zeros(vocab, width)
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=back)
        outer.addmm_(logits.t(), hidden)
        best = min(best, time.perf_counter() - start)
    return best * tokens / CHUNK


def free_bytes() -> float:
    """Memory that the system can still give (Linux)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def run_long_shapes(tokens: Sequence[int], width: int, vocab: int, *, rounds: int, minutes: float) -> None:
    """Every row at every T, printed as soon as it is measured."""
    end = time.monotonic() + 60 * minutes
    per_token: dict[str, float] = {}
    print(f"forward + backward, D={width} V={vocab}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        f"{rounds} round(s); ratios to three fp32 products at chunk {CHUNK}; lost where: shares of the row's own time"
    )
    with working_bf16_products(print):
        for row in ROWS:  # loads every kernel, and compiles the C helper
            row.call(make_problem(32, 64, 1024, torch.float32 if row.autocast else BF16))
        for count in tokens:
            best: dict[str, float] = {}
            for round_index in range(rounds):
                for name, seconds in _one_round(count, width, vocab, round_index + 1, per_token, end).items():
                    best[name] = min(seconds, best.get(name, seconds))
            print_pairs(best)


def _one_round(
    tokens: int, width: int, vocab: int, round_number: int, per_token: dict[str, float], end: float
) -> dict[str, float]:
    """Seconds of every row that was run."""
    found: dict[str, float] = {}
    before = product_seconds(width, vocab, tokens)
    print(f"\nT={tokens}, round {round_number}: three products {before:.1f} s\n")
    print("| | s | ms/token | to products | lost where |\n|---|--:|--:|--:|---|", flush=True)
    problems: dict[bool, Problem] = {}
    for row in ROWS:
        if reason := _why_not(row, tokens, width, vocab, per_token, end):
            print(f"| {row.name} | {reason} | | | |", flush=True)
            continue
        if row.autocast not in problems:
            problems.clear()  # one problem at a time: a head of this size is a gigabyte
            problems[row.autocast] = make_problem(tokens, width, vocab, torch.float32 if row.autocast else BF16)
        to_stderr(f"T={tokens}: {row.name}")
        with time_shares() as shares:
            start = time.perf_counter()
            row.call(problems[row.autocast])
            seconds = time.perf_counter() - start
        found[row.name], per_token[row.name] = seconds, seconds / tokens
        lost = shares_line(shares, seconds) if row.is_ours else ""
        numbers = f"{seconds:.1f} | {1e3 * seconds / tokens:.2f} | {seconds / before:.3f}"
        print(f"| {row.name} | {numbers} | {lost} |", flush=True)
    after = product_seconds(width, vocab, tokens)
    if max(before, after) > 1.15 * min(before, after):
        print(f"\nnot quiet: the three products took {before:.1f} s before these rows and {after:.1f} s after them")
    return found


def print_pairs(best: dict[str, float]) -> None:
    """Ratios of minima over the rounds of one T."""
    print()
    for mine, other in PAIRS:
        if mine in best and other in best:
            print(f"{mine} / {other}: {best[mine] / best[other]:.3f}", flush=True)


def shares_line(shares: dict[str, float], seconds: float) -> str:
    """Percentages of one call."""
    products = sum(shares.get(name, 0.0) for name in PRODUCTS)
    named = {"products": products} | {name: value for name, value in shares.items() if name not in PRODUCTS}
    named["rest"] = seconds - sum(named.values())
    return ", ".join(f"{name} {100 * value / seconds:.0f} %" for name, value in named.items())


def _why_not(row: Row, tokens: int, width: int, vocab: int, per_token: dict[str, float], end: float) -> str | None:
    needed = row.token_bytes * tokens * vocab + 14 * vocab * width
    if needed > 0.9 * free_bytes():
        return f"not run: needs {needed / GB:.0f} GB"
    predicted = tokens * per_token.get(row.name, 0.0)
    if time.monotonic() + predicted > end:
        return f"not run: {predicted / 60:.0f} min predicted, raise --minutes"
    return None
