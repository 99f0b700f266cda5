"""Run times of `zloss.audit_loss` by kind of loss.

    python benchmarks/bench_audit_loss.py [--repeat 3] [--only TEXT]

Each line is measured on losses of the zoo of the tests and on those below. A loss is audited `repeat` times, all losses in turn;
its time is the smallest. The table has the smallest and the largest time among the losses of a line, in seconds of wall time,
and how often a loss was called. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import zloss

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.audit.loss.zoo import IGNORE, LAMBDA, ZOO, ce, lse, mean, zl

Case = tuple[Callable[..., Any], dict[str, Any]]


def ours(objective: Any) -> Case:
    return (lambda h, w, y: zloss.head_loss(h, w, y, objective)), {"linear": True}


def probabilities(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(lse(z.softmax(-1)).square(), y)


def log_probabilities(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(lse(z.log_softmax(-1)).square(), y)


def max_shifted(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(lse(z - z.amax(-1, keepdim=True)).square(), y)


def mean_of_relative(z: Tensor, y: Tensor) -> Tensor:
    return ce(z, y) + LAMBDA * mean(lse(z) - z.mean(-1), y)


def class_weights_and_smoothing(z: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, z.shape[-1], dtype=z.dtype)
    return F.cross_entropy(z, y, weight=weight, label_smoothing=0.1, ignore_index=IGNORE) + zl(z, y)


def bf16_throughout(z: Tensor, y: Tensor) -> Tensor:
    z = z.bfloat16()
    return ce(z, y) + 1e-5 * mean(lse(z).square(), y)


OWN: dict[str, Case] = {
    "ours, standard": ours(zloss.StandardZLoss(LAMBDA)),
    "ours, centered": ours(zloss.CenteredZLoss(LAMBDA)),
    "ours, factorized": ours(zloss.FactorizedZLoss(LAMBDA, LAMBDA)),
    "ours, gain-aware": ours(zloss.GainAwareZLoss(LAMBDA)),
    "of probabilities": (probabilities, {}),
    "of log-probabilities": (log_probabilities, {}),
    "max-shifted": (max_shifted, {}),
    "mean of log Z − μ": (mean_of_relative, {}),
    "class weights and smoothing": (class_weights_and_smoothing, {}),
    "bf16, λ = 1e-5": (bf16_throughout, {}),
}
"""Losses that the zoo does not have."""

LINES: dict[str, tuple[str, ...]] = {
    "CE + λ(log Z − c)², raw": ("ours, standard", "ours, centered", "ours, factorized", "ours, gain-aware"),
    "denominators: valid": ("Z/√N", "Z/(N + 1)", "both over N + 1"),
    "c constant, log V": ("c = log V − 1",),
    "label smoothing ε/V": ("t5x smoothing", "torch smoothing"),
    "`ignore_index` or pad id": ("ignore_index 0", "pad 0, not told"),
    "class weights, per-position weights": ("class weights", "token weights", "focal with Z", "poly loss with Z"),
    "means of chunks or sequences": ("means of chunks", "means of sequences"),
    "labels shifted inside": ("shifted",),
    "rolled labels": ("rolled",),
    "logit scale, softcap": ("temperature", "scale and softcap"),
    "(total, ce, z)": ("returns sum, n", "returns ce without z, logits"),
    "(ce, z), to be added": ("returns ce, z",),
    "its own V only": ("wants V = 50257", "wants multiples of 128"),
    "λ·mean(log Z), the square missing": ("missing square",),
    "one-sided, Huber": ("one-sided", "Huber", "cube", "absolute"),
    "Z on some tokens only": ("every other token", "random tokens", "root of the mean"),
    "Z of log-probabilities": ("of probabilities", "of log-probabilities", "max-shifted"),
    "a tail left out of log Z": ("tail of 4096 missing", "counts at most 256", "drops tokens beyond blocks of 128"),
    "λ·mean(log Z − μ)": ("mean of log Z − μ",),
    "Z of logits that are scaled": ("Z of capped logits", "Z of scaled logits"),
    "log Z over part of the vocabulary": ("top classes in log Z", "entropy bonus", "mean square of the logits"),
    "class weights together": ("class weights and smoothing",),
    "targets replaced inside": ("targets plus one",),
    "random numbers inside": ("schedule",),
    "a part that is switched": ("sum of Z clipped",),
    "16-bit arithmetic throughout": ("bf16, λ = 1e-5",),
}
"""Kind of loss → losses that it is measured on."""


def case(name: str) -> Case:
    """The loss of that name, here or in the zoo, and the options of its audit."""
    if name in OWN:
        return OWN[name]
    loss, options, _ = ZOO[name]
    return loss, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="Audits of each loss.")
    parser.add_argument("--only", default="", help="Lines that contain this text.")
    options = parser.parse_args()
    lines = {title: names for title, names in LINES.items() if options.only in title}
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for _ in range(options.repeat):
        for name in dict.fromkeys(name for names in lines.values() for name in names):
            loss, more = case(name)
            started = time.perf_counter()
            audit = zloss.audit_loss(loss, **more)
            taken = time.perf_counter() - started
            seconds[name], calls[name] = min(taken, seconds.get(name, taken)), audit.provenance["calls"]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, least of {options.repeat} audits\n")
    print("| kind of loss | seconds | calls |\n|---|---:|---:|")
    for title, names in lines.items():
        least, most = min(seconds[name] for name in names), max(seconds[name] for name in names)
        span = f"{least:.1f}" if most - least < 0.5 else f"{least:.1f} to {most:.1f}"
        print(f"| {title} | {span} | {min(calls[n] for n in names)} to {max(calls[n] for n in names)} |")


if __name__ == "__main__":
    main()
