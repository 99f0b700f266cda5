"""Speed against the peers that are installed, as one table, then every property test on the GPU; written as Markdown and JSON.

    make gpu                                            # installs the CUDA build into .venv-gpu, then runs this
    python -m benchmarks.gpu                            # where torch and zloss are installed, from the repository
    python -m benchmarks.gpu --device cpu --quick       # the same way without a GPU, as tests do

Exit codes: 0 all property tests pass, 1 one fails, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

CONTRIBUTED = Path("docs/results/gpu")
"""Where the two files of a machine go."""


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where it runs, default cuda")
    parser.add_argument("--quick", action="store_true", help="few cases and tiny shapes")
    parser.add_argument("--out", type=Path, default=CONTRIBUTED, help=f"folder of the two files, default {CONTRIBUTED}")
    parser.add_argument("--calls", type=int, help="calls of the memory test, default 10000, with --quick 20")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of the timing, default 9, with --quick 1")
    parser.add_argument(
        "--shape", type=int, nargs=3, action="append", metavar=("T", "D", "V"), help="shape to time; may be repeated"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="dtype of the timing")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="when to stop, default 10; half of it is for the timings"
    )
    parser.add_argument("--no-timing", action="store_true", help="property tests only")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    arguments = parsed(words)
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports the kernels
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU that torch can use here: run this on a machine with one.", file=sys.stderr)
        return 2
    from benchmarks.gpu.markdown import as_markdown, failure_line
    from benchmarks.gpu.run import run
    from zloss.results.io import write_bytes, write_json

    report = run(arguments)
    name = re.sub(r"[^a-z0-9]+", "-", report.machine.device.lower()).strip("-")
    write_json(arguments.out / f"{name}.json", report.to_dict())
    write_bytes(arguments.out / f"{name}.md", as_markdown(report).encode())
    for failure in report.failures:
        print(failure_line(failure))
    cases = sum(line.cases for line in report.laws)
    print(f"{cases} cases, {len(report.failures)} failed; written: {arguments.out / name}.md and .json")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
