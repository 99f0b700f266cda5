"""Every fuzzer on a few new seeds, and on the seeds that once failed; `make fuzz` goes on for as long as one likes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS

SAVED: dict[str, list[int]] = json.loads((Path(__file__).parent / "seeds.json").read_text(encoding="utf-8"))
"""Seeds that broke the contract when they were found, by kind; a change of a fuzzer or its examples changes what they draw."""
FEW = {
    "public losses": 150,
    "result files": 40,
    "run folders": 10,
    "corpora": 150,
    "model folders": 8,
    "command line": 20,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_cases(kind: str, tmp_path: Path) -> None:
    for seed in range(FEW[kind]):
        KINDS[kind](seed, tmp_path / "case")


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in SAVED.items() for seed in seeds])
def test_a_case_that_once_failed(kind: str, seed: int, tmp_path: Path) -> None:
    KINDS[kind](seed, tmp_path / "case")


def test_every_kind_has_saved_seeds_of_its_own() -> None:
    assert SAVED.keys() <= KINDS.keys() == FEW.keys()
