"""`make fuzz`: every fuzzer in turn until the time is over; cases by kind, and the seed of every failure.

FUZZ_MINUTES   minutes in all (default 30)
FUZZ_SEED      first seed (default: from the clock, printed)
FUZZ_KINDS     kinds to run, comma-separated (default: all)
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from tests.fuzz import command_line, corpora, damage, losses

CASES: dict[str, Callable[[Random, Path], None]] = {
    "public losses": losses.case,
    "result files": damage.result_file,
    "run folders": damage.run_folder,
    "corpora": corpora.case,
    "model folders": damage.model_folder,
    "command line": command_line.case,
}


def run_case(kind: str, seed: int, folder: Path) -> None:
    """One case in an empty folder; the seed determines what it draws."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(seed % 2**31)
    CASES[kind](Random(f"{kind} {seed}"), folder)


def main() -> int:
    """0 where no case failed."""
    minutes = float(os.environ.get("FUZZ_MINUTES", "30"))
    first = int(os.environ.get("FUZZ_SEED") or time.time())
    wanted = [name.strip() for name in os.environ.get("FUZZ_KINDS", "").split(",") if name.strip()]
    kinds = [name for name in CASES if not wanted or name in wanted]
    print(f"{minutes:g} minutes over {', '.join(kinds)}; first seed {first}", flush=True)
    end = time.monotonic() + 60 * minutes
    cases, seconds, failed = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0), dict[str, list[int]]()
    with tempfile.TemporaryDirectory(prefix="zloss-fuzz-") as scratch:
        counts = {name: itertools.count(first) for name in kinds}
        while time.monotonic() < end:
            # The kind that has had the least time is next, so that slow kinds do not crowd out the others.
            name = min(kinds, key=lambda kind: seconds[kind])
            seed, begin = next(counts[name]), time.monotonic()
            try:
                run_case(name, seed, Path(scratch) / name.replace(" ", "-"))
            except Exception:
                failed.setdefault(name, []).append(seed)
                print(f"--- {name}, seed {seed}\n{traceback.format_exc()}", flush=True)
            cases[name] += 1
            seconds[name] += time.monotonic() - begin
    for name in kinds:
        bad = failed.get(name, [])
        print(
            f"{name:<16} {cases[name]:>7} cases  {seconds[name]:>7.0f} s  {len(bad)} failed  {bad[:20] or ''}".rstrip()
        )
    print(f"{'in all':<16} {sum(cases.values()):>7} cases  {sum(map(len, failed.values()))} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
