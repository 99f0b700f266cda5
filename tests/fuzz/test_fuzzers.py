"""Every fuzzer on a few new seeds, and on the seeds that once failed; `make fuzz` runs for as long as you like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.__main__ import CASES, run_case

SAVED: dict[str, list[int]] = json.loads((Path(__file__).parent / "seeds.json").read_text(encoding="utf-8"))
"""Seeds that broke the contract when they were found, by kind; a change of a fuzzer or its examples changes what they draw."""
FEW = dict(zip(CASES, (150, 40, 10, 150, 8, 20), strict=True))


@pytest.mark.parametrize("kind", CASES)
def test_a_few_cases(kind: str, tmp_path: Path) -> None:
    for seed in range(FEW[kind]):
        run_case(kind, seed, tmp_path / "case")


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in SAVED.items() for seed in seeds])
def test_a_case_that_once_failed(kind: str, seed: int, tmp_path: Path) -> None:
    run_case(kind, seed, tmp_path / "case")
