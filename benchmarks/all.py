"""Every benchmark in turn, as one table of figures with machine and commit.

    python benchmarks/all.py [--out docs/results/benchmarks] [--only head_loss audit …] [--quick]

About 35 minutes on two quiet cores. The command fails if a figure exceeds its ceiling, which its benchmark states, by more
than the measured noise. Writes a Markdown and a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ceilings import RECORD, Figure

HERE = Path(__file__).parent
SCHEMA = "zloss.benchmarks/1"


@dataclass(frozen=True)
class Benchmark:
    """One command; `quick` is what a short run adds to it."""

    name: str
    words: tuple[str, ...]
    quick: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        return "python benchmarks/" + " ".join(self.words)


BENCHMARKS = (
    Benchmark("head_loss", ("bench_head_loss.py",), ("--quick",)),
    Benchmark("call", ("bench_call.py",), ("--rounds", "10")),
    Benchmark("audit_pass", ("bench_audit.py",), ("--blocks", "16")),
    Benchmark("audit_whole", ("bench_audit.py", "--whole")),
    Benchmark("audit_memory", ("bench_audit.py", "--memory")),
    Benchmark("train_step", ("bench_train_step.py",), ("--quick",)),
    Benchmark("router", ("bench_router.py",), ("--rounds", "3")),
    Benchmark("integrations", ("bench_integrations.py",), ("--quick",)),
    Benchmark("roofline", ("roofline.py", "--tokens", "16384", "--width", "4096", "--vocab", "131072")),
)


def run(benchmark: Benchmark, *, quick: bool) -> tuple[list[Figure], float, str]:
    """Figures, seconds and, where the command itself failed, the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "figures.jsonl"
        record.touch()
        words = [
            sys.executable,
            str(HERE / benchmark.words[0]),
            *benchmark.words[1:],
            *(benchmark.quick if quick else ()),
        ]
        begin = time.perf_counter()
        environment = os.environ | {RECORD: str(record)}
        done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False)
        figures = [Figure(**json.loads(line)) for line in record.read_text(encoding="utf-8").splitlines()]
        print(done.stdout, flush=True)
        # Exit code 1 means a missed ceiling, which is evaluated here with the noise; anything else is a failure.
        broken = done.returncode not in (0, 1) or "Traceback" in done.stderr or not figures
        return figures, time.perf_counter() - begin, done.stderr[-2000:] if broken else ""


def machine() -> dict[str, Any]:
    """Where the figures were taken."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def table(results: list[dict[str, Any]], where: dict[str, Any]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "The latest run of every benchmark, with its ceiling (`make bench-all`). Smaller is better; a ratio is of times measured",
        "in the same rounds. Noise is the relative difference of a figure between odd and even rounds; a figure fails if it",
        "exceeds its ceiling by more.",
        "",
        f"{where['processor']}, {where['cores']} cores, Python {where['python']}, torch {where['torch']}, "
        f"commit {where['commit']}.",
        "",
        "| figure | value | ceiling | noise | |",
        "|---|--:|--:|--:|---|",
    ]
    for result in results:
        lines.append(
            f"| **`{result['command']}`** ({result['seconds']:.0f} s) | | | | {result['failure'] and 'failed'} |"
        )
        for figure in (Figure(**values) for values in result["figures"]):
            unit = f" {figure.unit}" if figure.unit else ""
            verdict = "met" if figure.met else "within noise" if figure.within_noise else "**missed**"
            noise = f"{100 * figure.noise:.1f} %" if figure.noise else ""
            lines.append(
                f"| {figure.name} | {figure.value:.3f}{unit} | {figure.ceiling:.4g}{unit} | {noise} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "docs/results/benchmarks", help="file without its ending"
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="these benchmarks alone")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and values, for a first look")
    given = parser.parse_args()
    results = []
    for benchmark in (benchmark for benchmark in BENCHMARKS if benchmark.name in given.only):
        print(f"== {benchmark.command}", flush=True)
        figures, seconds, failure = run(benchmark, quick=given.quick)
        if failure:
            print(failure, file=sys.stderr)
        results.append(
            {
                "command": benchmark.command,
                "seconds": round(seconds, 1),
                "failure": failure.strip().rpartition("\n")[2],
                "figures": [asdict(figure) for figure in figures],
            }
        )
    where = machine()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"schema": SCHEMA, "machine": where, "results": results}
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(table(results, where), encoding="utf-8")
    missed = [f["name"] for result in results for f in result["figures"] if not Figure(**f).within_noise]
    failed = [result["command"] for result in results if result["failure"]]
    for what, found in (("above the ceiling by more than the noise", missed), ("failed", failed)):
        if found:
            print(f"{what}: {'; '.join(found)}")
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
