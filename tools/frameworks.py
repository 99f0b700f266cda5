"""Tests the framework integrations against the real packages and writes docs/results/frameworks.md.

    python -m tools.frameworks [NAME ...]

Each framework is installed with `pip install --no-deps --target .frameworks/NAME`, over the pinned torch of `.venv`, and its
tests run with that folder in front of the path. The tests state their relative errors (`tests/integrations/framework_table.py`),
which become the rows of the table. Frameworks that are not requested keep the rows they have. Exit code 1 if a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integrations.framework_table import TABLE_VARIABLE, Row

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ROOT / ".frameworks"
RECORD = ROOT / "docs/results/frameworks.json"
SCHEMA = "zloss.frameworks/1"
CONSTRAINTS = ("constraints.txt", "constraints-frameworks.txt")


@dataclass(frozen=True)
class Framework:
    """A framework, what its import needs beyond `.venv` (versions: `CONSTRAINTS`), and its tests."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]


FRAMEWORKS = {
    "axolotl": Framework(("axolotl", "addict", "numba", "llvmlite"), ("tests/integrations/test_axolotl.py",)),
    "jax": Framework(("jax", "jaxlib", "ml_dtypes", "opt_einsum"), ("tests/audit/loss/test_jax.py",)),
    "megatron": Framework(("megatron-core",), ("tests/integrations/test_megatron.py",)),
    "olmo-core": Framework(
        # cached-path imports the clients of both clouds.
        (
            "ai2-olmo-core",
            "cached-path",
            "dataclass-extensions",
            "bettermap",
            "boto3",
            "botocore",
            "s3transfer",
            "jmespath",
            "google-api-core",
            "google-auth",
            "google-cloud-core",
            "google-cloud-storage",
            "google-resumable-media",
            "googleapis-common-protos",
        ),
        ("tests/integrations/test_olmo_core.py",),
    ),
    "torchtitan": Framework(
        ("torchtitan", "spmd_types", "torchdata", "torch_checkpointing", "einops"),
        ("tests/integrations/test_torchtitan.py",),
    ),
    "nemo": Framework(("nemo-automodel", "torchao", "torchdata"), ("tests/integrations/test_nemo.py",)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FRAMEWORKS)}; all of them by default")
    names = parser.parse_args().names or list(FRAMEWORKS)
    unknown = sorted(set(names) - FRAMEWORKS.keys())
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; expected {', '.join(FRAMEWORKS)}")
    kept = json.loads(RECORD.read_text(encoding="utf-8"))["frameworks"] if RECORD.exists() else {}
    red = False
    for name in names:
        print(f"{name}: installing", flush=True)
        install(name)
        kept[name] = run(name)
        red |= kept[name]["failed"]
        record = {"schema": SCHEMA, "frameworks": kept}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        RECORD.with_suffix(".md").write_text(page(kept), encoding="utf-8")
    return int(red)


def install(name: str) -> None:
    """Install the packages of a framework into its folder, unless they are there."""
    packages = FRAMEWORKS[name].packages
    stamp = FOLDERS / name / ".installed"
    wanted = "\n".join([*packages, *((ROOT / file).read_text(encoding="utf-8") for file in CONSTRAINTS)])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    pip += [word for file in CONSTRAINTS for word in ("-c", file)]
    subprocess.run([*pip, "--no-deps", "--upgrade", "--target", str(FOLDERS / name), *packages], cwd=ROOT, check=True)
    stamp.write_text(wanted, encoding="utf-8")


def run(name: str) -> dict[str, object]:
    """Run the tests of a framework; its rows, versions, seconds, and whether a test failed."""
    rows_file = FOLDERS / f"{name}.jsonl"
    rows_file.unlink(missing_ok=True)
    path = os.pathsep.join([str(FOLDERS / name), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, TABLE_VARIABLE: str(rows_file), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-m", "pytest", *FRAMEWORKS[name].tests], cwd=ROOT, env=environment)
    lines = rows_file.read_text(encoding="utf-8").splitlines() if rows_file.exists() else []
    return {
        "rows": [json.loads(line) for line in lines],
        "versions": versions(FOLDERS / name, FRAMEWORKS[name].packages[0]),
        "seconds": round(time.monotonic() - begin),
        "failed": ended.returncode != 0,
    }


def versions(folder: Path, package: str) -> str:
    """The installed version of the framework itself."""
    from importlib.metadata import distributions

    found = {one.name: one.version for one in distributions(path=[str(folder)])}
    return f"{package} {found[package]}"


def page(kept: dict[str, dict[str, object]]) -> str:
    """The table of all frameworks as Markdown."""
    lines = [
        "# Framework integrations against the real packages",
        "",
        "Written by `make frameworks`, on CPU processes with gloo. *Error*: the relative difference to an eager reference.",
        "*Without Z*: the same difference if the Z-loss were missing, which a test has to be able to see.",
        "",
        "| framework | case | error | without Z |",
        "|---|---|--:|--:|",
    ]
    for name in sorted(kept):
        rows = [Row(**row) for row in kept[name]["rows"]]  # type: ignore[attr-defined]
        lines += [f"| {kept[name]['versions']} | {row.case} | {row.error:.1e} | {row.without_z:.1e} |" for row in rows]
        if kept[name]["failed"]:
            lines.append(f"| {kept[name]['versions']} | **a test failed** | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
