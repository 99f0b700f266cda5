"""Do two checkouts of this repository give the same numbers? Runs the product in both and compares every result file.

    git worktree add ../before 8bac60a
    python tools/same_numbers.py --before ../before --after . --text TEXT [--keep FOLDER] [JOB ...]

Jobs: one audit of SmolLM2, a tiny grid of training runs with its comparison, a mixture-of-experts grid, one smoke
reproduction of each family of tables, one audit of a loss. Each number of each JSON file is compared by its path: equal
bits, or the relative difference. Keys that only one side has are listed. What depends on the clock or on the checkout
(versions, commands, seconds) is left out. Exit code 1 where a number differs by more than --tolerance (default 1e-6).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEFT_OUT = {
    *(
        "provenance",
        "timings",
        "command",
        "seconds",
        "started",
        "finished",
        "made_by",
        "zloss",
        "torch",
        "wall_seconds",
    ),
    *("tokens_per_second", "train_seconds", "step_seconds", "host", "python"),
}
TINY = [
    *("--from-config", "tiny", "--train-tokenizer", "300", "--block-size", "24", "--valid-blocks", "6"),
    *("--micro-batch", "2", "--accumulate", "2", "--adam-every", "4", "--steps", "12", "--warmup", "2"),
    *("--seeds", "1,2", "--corpus", "pydoc"),
]
LOSS = """
import torch
import torch.nn.functional as F


def loss(logits, target):
    log_z = torch.logsumexp(logits.float(), -1)
    valid = target != -100
    z = 1e-3 * (log_z[valid] ** 2).mean()
    return F.cross_entropy(logits.float(), target) + z, z
"""
JOBS: dict[str, list[list[str]]] = {
    "audit": [["audit", "smollm2", "--text", "{text}", "--blocks", "4", "--out", "{out}", "--quiet"]],
    "train": [
        ["train", *TINY, "--methods", "ce,centered-head,standard,centered,factorized,gain-aware", "--coef", "1e-3",
         "--out", "{out}", "--quiet"],
        ["compare", "{out}"],
    ],
    "moe": [
        ["train", "--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--moe-heads", "2",
         "--router", "none,token_layer_mean,active_route_sum:matched", "--train-tokenizer", "300", "--block-size", "24",
         "--valid-blocks", "6", "--micro-batch", "2", "--steps", "8", "--warmup", "2", "--seeds", "1,2",
         "--corpus", "pydoc", "--out", "{out}", "--quiet"],
        ["compare", "{out}"],
    ],
    "heads": [["reproduce", "tab:pretrained", "--profile", "smoke", "--out", "{out}", "--quiet"]],
    "implementations": [
        ["reproduce", "tab:source_audit", "tab:update_audit", "--profile", "smoke", "--out", "{out}", "--quiet"]
    ],
    "training": [["reproduce", "tab:finetune", "--profile", "smoke", "--out", "{out}", "--quiet"]],
    "router": [["reproduce", "tab:router", "--profile", "smoke", "--out", "{out}", "--quiet"]],
    "moe-table": [["reproduce", "tab:moe", "--profile", "smoke", "--out", "{out}", "--quiet"]],
    "loss": [["audit-loss", "{loss}:loss", "--out", "{out}"]],
}  # fmt: skip


def run_job(checkout: Path, job: str, folder: Path, text: str, cache: Path) -> None:
    """All commands of a job with the sources of one checkout; a verdict (exit code 1) is a result, an error is not."""
    loss_file = folder.parent / "loss_of_same_numbers.py"
    loss_file.write_text(LOSS)
    folder.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "ZLOSS_CACHE": str(cache)}
    for words in JOBS[job]:
        filled = [word.format(out=folder, text=text, loss=loss_file) for word in words]
        code = "import sys; from zloss.cli.main import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", code, *filled], env=environment, cwd=folder.parent, capture_output=True, text=True
        )
        if done.returncode not in (0, 1):
            sys.exit(f"{checkout}: zloss {' '.join(filled)} ended with {done.returncode}:\n{done.stderr}")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, scalar) of every value of a parsed JSON file that must not depend on time or checkout."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in LEFT_OUT:
                yield from leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def read(folder: Path) -> dict[str, Any]:
    """Every scalar of every result below a folder, by file and path."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.json*")):
        name = file.relative_to(folder)
        if any(part in ("tokenizer", "model", "checkpoints", "state", "base") for part in name.parts):
            continue
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        for number, line in enumerate(lines):
            for path, value in leaves(json.loads(line)):
                found[f"{name}:{number}:{path}" if file.suffix == ".jsonl" else f"{name}:{path}"] = value
    return found


def difference(before: Any, after: Any) -> float:
    """0 for equal values, the relative difference of numbers, infinity for anything else."""
    if before == after:
        return 0.0
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, after)]
    if not all(numbers):
        return math.inf
    return abs(after - before) / max(abs(before), abs(after))


def compare(before: dict[str, Any], after: dict[str, Any], tolerance: float) -> bool:
    """Print how the values agree; True where every number is within the tolerance."""
    both = [key for key in before if key in after]
    numbers = [key for key in both if isinstance(before[key], (int, float)) and not isinstance(before[key], bool)]
    gaps = {key: gap for key in numbers if (gap := difference(before[key], after[key]))}
    words = [key for key in both if key not in set(numbers) and before[key] != after[key]]
    worst = max(gaps.values(), default=0.0)
    print(f"  {len(numbers)} numbers, {len(numbers) - len(gaps)} with equal bits, largest difference {worst:.3g}")
    for key, gap in sorted(gaps.items(), key=lambda item: -item[1])[:12]:
        print(f"    {gap:.2e}  {key}: {before[key]!r} -> {after[key]!r}")
    for title, keys in (
        ("other words", words),
        ("only before", [key for key in before if key not in after]),
        ("only after", [key for key in after if key not in before]),
    ):
        if keys:
            print(f"  {len(keys)} {title}: {', '.join(keys[:6])}{' …' if len(keys) > 6 else ''}")
    return worst <= tolerance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"default: all of {', '.join(JOBS)}")
    parser.add_argument("--before", type=Path, required=True, help="checkout with the old sources")
    parser.add_argument("--after", type=Path, default=Path(), help="checkout with the new sources (default: here)")
    parser.add_argument("--text", required=True, help="text of the audit")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="largest relative difference that passes")
    parser.add_argument(
        "--keep", type=Path, help="folder for the results; results of --before found there are used again"
    )
    options = parser.parse_args()
    equal = True
    with tempfile.TemporaryDirectory() as temporary:
        base = (options.keep or Path(temporary)).resolve()
        base.mkdir(parents=True, exist_ok=True)
        for job in options.jobs or JOBS:
            print(job, flush=True)
            for side in ("before", "after"):
                folder = base / side / job
                if folder.exists() and side == "before":
                    continue
                subprocess.run(["rm", "-rf", str(folder)], check=True)
                folder.parent.mkdir(parents=True, exist_ok=True)
                checkout: Path = getattr(options, side)
                run_job(checkout.resolve(), job, folder, str(Path(options.text).resolve()), base / "cache")
            equal = compare(read(base / "before" / job), read(base / "after" / job), options.tolerance) and equal
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
