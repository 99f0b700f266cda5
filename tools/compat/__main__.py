"""Tests zloss in one throw-away environment per row and writes the table of docs/results/compat.md.

    python -m tools.compat [--only ROW …] [--out docs/results/compat]

Rows are listed in `tools/compat/rows.py`, tests in `tools/compat/selection.py`. A row with the CUDA build of torch takes 5 GB of
download and 8 GB of disk, which is freed before the next row. A row takes 5 to 10 minutes on one core. Rows that are not
selected keep their results. Exit code 1 if a row fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.compat.record import Outcome, current_record, page, read_record, write_record
from tools.compat.rows import ROOT, ROWS
from tools.compat.run import commit, run_row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/compat", help="file without its ending")
    given = parser.parse_args()
    state = commit()
    wanted = [row for row in ROWS if row.name in given.only]
    ended: list[Outcome] = []
    for place, row in enumerate(wanted, start=1):
        print(f"[{place}/{len(wanted)}] {row.name}: Python {row.python}, {row.what}", flush=True)
        outcome = run_row(row, state)
        ended.append(outcome)
        print(f"  {outcome.verdict}: {outcome.summary}", flush=True)
        earlier = read_record(given.out)
        record = current_record([*(earlier.rows if earlier else ()), outcome])
        write_record(given.out, record)
        given.out.with_suffix(".md").write_text(page(record), encoding="utf-8")
    return 1 if any(outcome.verdict == "red" for outcome in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
