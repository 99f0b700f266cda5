"""How often a verdict is wrong where nothing differs, and how often a planted effect is found.

    python benchmarks/verdict_rates.py [--out DIR] [--seeds 14] [--steps 24]

CE is trained from scratch at many seeds (a tiny model, seconds each; the runs are kept in DIR and shared by all pairs).

A/A: the runs of two seeds, labeled as a method, are compared with the runs of two other seeds, labeled as CE. Only
the seed differs, so every verdict except "inconclusive" and "no effect" is wrong. For the diagnosed quantity the two
sides do differ by their seeds' noise, which the interval has to cover.

Planted effects: a method that is CE with its validation numbers changed by a known amount, at three spreads over seeds
and blocks. The part in question has to find it in at least nine of ten trials.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from zloss.cli.main import main
from zloss.results.comparison import Verdict
from zloss.results.run_metrics import ValidationBlocks
from zloss.train.compare import compare_runs
from zloss.train.finished import FinishedRun, load_runs

PAIRS = 40
TRIALS = 10
METHOD, COEF = "standard", 1e-4


def trained(folder: Path, seeds: int, steps: int) -> list[FinishedRun]:
    """CE at seeds 1 … n; runs that exist already are reused."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    words = ["train", "--from-config", "tiny", "--train-tokenizer", "512", "--methods", "ce", "--quiet"]
    words += ["--seeds", ",".join(map(str, range(1, seeds + 1))), "--steps", str(steps), "--lr", "1e-3"]
    words += ["--block-size", "64", "--valid-blocks", "96", "--micro-batch", "4", "--adam-every", "4"]
    words += ["--text", str(text), "--trackers", "none", "--checkpoint-every", "0", "--out", str(folder / "runs")]
    assert main(words) == 0
    return load_runs(folder / "runs")[0]


def as_run(run: FinishedRun, seed: int, *, method: bool) -> FinishedRun:
    """The same numbers as a run of CE, or of the method, at another seed."""
    name, coef = (METHOD, COEF) if method else ("ce", 0.0)
    config = {**run.config, "method": name, "coef": coef, "seed": seed}
    return FinishedRun(run.folder, config, replace(run.record, method=name, coef=coef, seed=seed), run.provenance)


def verdict_on(baseline: list[FinishedRun], method: list[FinishedRun]) -> Verdict:
    """The verdict on `method`, paired with `baseline` in the given order."""
    runs = [as_run(run, i + 1, method=False) for i, run in enumerate(baseline)]
    runs += [as_run(run, i + 1, method=True) for i, run in enumerate(method)]
    (verdict,) = compare_runs(runs).quality.methods
    return verdict


def wrong(verdict: Verdict) -> bool:
    """Whether a verdict on equal methods says more than "inconclusive" or "no effect"."""
    parts = verdict.parts
    assert parts is not None
    assert parts.coordinate is not None
    assert parts.quality is not None
    assert parts.optimizer is not None
    no_effect = parts.coordinate.state == "fails"
    elsewhere = parts.quality.state == "fails" or parts.optimizer.state == "fails"
    return verdict.verdict == "accepted" or elsewhere or (verdict.verdict == "rejected" and not no_effect)


def null_pairs(seeds: int) -> Iterator[tuple[int, ...]]:
    """Distinct ((a, b), (c, d)) over the seeds, in an order that is the same each time."""
    every = [(*pair, *other) for pair in itertools.combinations(range(seeds), 2)
             for other in itertools.combinations(range(seeds), 2) if not set(pair) & set(other)]  # fmt: skip
    order = np.random.default_rng(0).permutation(len(every))
    return (every[i] for i in order[:PAIRS])


def changed(run: FinishedRun, rng: np.random.Generator, shift: float, factor: float, spread: float) -> FinishedRun:
    """`run` with CE larger by `shift` and tails multiplied by `factor`, with noise of the seed and of each block."""
    blocks = run.record.validation_blocks
    assert blocks is not None
    ce = np.array([value if value is not None else math.nan for value in blocks.ce])
    tokens = np.array(blocks.tokens)
    ce = ce + shift + rng.normal(0, spread) + rng.normal(0, 4 * spread, len(ce))
    scale = factor * math.exp(rng.normal(0, spread))
    noise = np.exp(rng.normal(0, 4 * spread, len(ce)))
    tails = {
        key: tuple(tuple(value * scale * part for value in values) for values, part in zip(tail, noise, strict=True))
        for key, tail in blocks.tails.items()
    }
    made: ValidationBlocks = replace(blocks, ce=tuple(ce.tolist()), tails=tails)
    mean = float((ce * tokens).sum() / tokens.sum())
    return replace(run, record=replace(run.record, ce=mean, ppl=math.exp(mean), validation_blocks=made))


def planted(
    runs: list[FinishedRun], rng: np.random.Generator, spread: float, seeds: int = 4
) -> tuple[bool, bool, bool]:
    """Whether a rise of CE, a fall of the tail, and an acceptable method are each found."""
    chosen = [runs[i] for i in rng.choice(len(runs), seeds, replace=False)]
    worse = verdict_on(chosen, [changed(run, rng, 0.1, 0.9, spread) for run in chosen]).parts
    better = verdict_on(chosen, [changed(run, rng, -0.02, 0.8, spread) for run in chosen])
    assert worse is not None
    assert worse.quality is not None
    assert better.parts is not None
    assert better.parts.coordinate is not None
    return worse.quality.state == "fails", better.parts.coordinate.state == "holds", better.verdict == "accepted"


def report(folder: Path, seeds: int, steps: int) -> int:
    runs = trained(folder, seeds, steps)
    assert runs[0].record.validation_blocks is not None
    print(f"{seeds} runs of CE from scratch, {steps} steps, {runs[0].record.valid_predictions} validation tokens each")
    verdicts = [verdict_on([runs[a], runs[b]], [runs[c], runs[d]]) for a, b, c, d in null_pairs(seeds)]
    states = {
        name: Counter(dict(v.parts.named())[name].state for v in verdicts if v.parts is not None)
        for name in ("quality", "coordinate", "optimizer")
    }
    errors = sum(map(wrong, verdicts))
    print(
        f"A/A, {len(verdicts)} pairs of 2 seeds: "
        + ", ".join(f"{n} {k}" for k, n in Counter(v.verdict for v in verdicts).items())
    )
    for name, found in states.items():
        print(f"  {name}: " + ", ".join(f"{n} {state}" for state, n in found.items()))
    print(f"  verdicts other than inconclusive or no effect: {errors} of {len(verdicts)}")
    good = errors <= 2 * len(verdicts) / 20
    for spread in (1e-4, 1e-3, 5e-3):
        rng = np.random.default_rng(1)
        found = np.array([planted(runs, rng, spread) for _ in range(TRIALS)]).sum(axis=0)
        print(
            f"planted, spread {spread:g} of a seed and {4 * spread:g} of a block, 4 seeds: CE + 0.1 nat rejected in "
            f"{found[0]} of {TRIALS}, tail × 0.8 found in {found[1]}, CE − 0.02 with tail × 0.8 accepted in {found[2]}"
        )
        good = good and bool((found >= 0.9 * TRIALS).all())
    print("as promised" if good else "NOT as promised")
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the shared runs; a temporary one by default")
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=24)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        raise SystemExit(report(given.out or Path(scratch), given.seeds, given.steps))
