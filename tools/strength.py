"""What the tests notice: line and branch coverage of every package, and which mutations the suite catches.

    python -m tools.strength [coverage] [mutations]        default: both; about an hour on two cores

Writes `tests/strength.json`, one entry per part with the commit it was measured at. Code that only subprocesses run does not
count as covered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.mutations import BLIND, MUTATIONS, caught

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "strength.json"
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def coverage() -> dict[str, Any]:
    """Shares of statements and branches, for the whole and by package."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        options = ["--cov=zloss", "--cov=zloss_paper", "--cov-branch", f"--cov-report=json:{report}", "--timeout=900"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COVERAGE_FILE": str(Path(folder) / "data")},
        )
        if not report.exists():
            sys.exit(f"pytest ended with {run.returncode} and without a coverage report.")
        files = json.loads(report.read_text())["files"]
    packages: dict[str, list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for name, file in files.items():
        parts = Path(name).relative_to("src").parts
        for package in ("all", "/".join(parts[:2]) if len(parts) > 2 else parts[0]):
            packages[package] = [a + file["summary"][key] for a, key in zip(packages[package], COUNTS, strict=True)]
    return {
        "failed": run.returncode != 0,
        "packages": {
            name: {
                "statements": lines,
                "statements_covered": round(covered / max(lines, 1), 4),
                "branches": branches,
                "branches_covered": round(taken / max(branches, 1), 4),
            }
            for name, (lines, covered, branches, taken) in sorted(packages.items())
        },
    }


def mutations() -> dict[str, Any]:
    """Each mutation with whether its tests fail on it."""
    found = {mutation.what: reason is None for mutation, reason in caught(MUTATIONS + BLIND)}
    return {"caught": sum(found.values()), "of": len(found), "each": found}


def main(parts: list[str]) -> int:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    for part in parts or ["coverage", "mutations"]:
        written[part] = {"commit": commit.strip(), **{"coverage": coverage, "mutations": mutations}[part]()}
        FILE.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
