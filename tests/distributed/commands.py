"""The commands of `zloss` that the tests run on two processes. As a program: run those given as JSON, one after another.

What a command writes is compared with what one process writes, entry by entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import leave
from zloss.cli.main import main as run_command
from zloss.jobs import open_job

COMMON = [
    *("--block-size", "24", "--valid-blocks", "6", "--adam-every", "4", "--gradient-blocks", "2"),
    *("--lr", "1e-3", "--checkpoint-every", "8", "--trackers", "none", "--quiet"),
]
DROPOUT = ["--steps", "80", "--micro-batch", "2", "--accumulate", "2", "--methods", "centered", "--coef", "1e-3"]
"""Micro-batches are divided; the model has dropout."""
SCRATCH = [
    *("--from-config", "tiny", "--train-tokenizer", "300", "--head", "paper", "--steps", "10", "--micro-batch", "3"),
    *("--methods", "ce,standard", "--coef", "1e-2"),
]
"""Three blocks of one micro-batch on two ranks."""
MOE = [
    *("--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--expert-width", "16"),
    *("--train-tokenizer", "300", "--steps", "6", "--micro-batch", "2", "--accumulate", "3"),
    *("--router", "active_route_sum", "--router-coef", "0.05", "--capacity-factor", "1.0"),
]
"""Three micro-batches on two ranks."""
AUDIT = ["--blocks", "21", "--block-size", "48", "--batch-blocks", "5", "--gradient-blocks", "3", "--no-figures"]


def train_argv(root: Path, *options: str, out: str, model: bool = False) -> list[str]:
    named = [str(root / "in" / "gpt2")] if model else []
    return ["train", *named, "--text", str(root / "in" / "text.txt"), *COMMON, *options, "--out", str(root / out)]


def audit_argv(root: Path, *options: str, out: str) -> list[str]:
    model, text = root / "in" / "gpt2", root / "in" / "text.txt"
    return ["audit", str(model), "--text", str(text), *AUDIT, *options, "--out", str(root / out)]


def commands(root: Path) -> dict[str, list[str]]:
    """By name, in the order in which they run."""
    whole = train_argv(root, *DROPOUT, out="whole", model=True)
    one_pass = [*DROPOUT[:4], "--accumulate", "1", "--methods", "ce"]
    return {
        "killed run": train_argv(root, *DROPOUT, out="killed", model=True),
        "whole run": whole,
        "blocks": train_argv(root, *SCRATCH, out="blocks"),
        "experts": train_argv(root, *MOE, out="experts"),
        "finished run": [word for word in whole if word != "--quiet"],
        "dropout refused": train_argv(root, *one_pass, out="refused", model=True),
        "experts refused": train_argv(root, *MOE, "--accumulate", "1", out="refused"),
        "few blocks": train_argv(root, *SCRATCH, "--micro-batch", "1", out="refused"),
        "audit": audit_argv(root, out="audit"),
        "placed audit": audit_argv(root, "--device-map", "auto", "--quiet", out="placed"),
        "killed audit": audit_argv(root, "--resume", "--quiet", out="killed-audit"),
        "no text": ["audit", *map(str, (root / "in" / "gpt2", "--text", root / "nowhere.txt", "--out", root / "none"))],
    }


def entries(value: Any, *, without: Collection[str], path: str = "") -> dict[str, Any]:
    """Every entry of a file by its place, except what is below the keys in `without`."""
    if isinstance(value, dict):
        inside = [(f"{path}.{key}", inner) for key, inner in value.items() if key not in without]
    elif isinstance(value, list):
        inside = [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
    else:
        return {path: value}
    return {
        name: entry for place, inner in inside for name, entry in entries(inner, without=without, path=place).items()
    }


def differing(got: dict[str, Any], want: dict[str, Any], rel: float) -> dict[str, Any]:
    """(got, want) of every entry that differs, numbers by more than `rel`."""
    assert got.keys() == want.keys()
    far = {}
    for name, value in want.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Differences of losses and gradients of nearly equal size: their own rounding is that of the larger numbers.
        if got[name] != (pytest.approx(value, rel=rel, abs=rel) if number else value):
            far[name] = (got[name], value)
    return far


def main() -> None:
    with open_job() as job:
        codes = []
        for argv in json.loads(sys.argv[1]):
            print(f"begin {len(codes)}", file=sys.stderr, flush=True)
            codes.append(job.all_gather(run_command(argv)))
        if job.first:
            print(json.dumps(codes))
        leave()


if __name__ == "__main__":
    main()
