"""`bench_head_loss.py --long` at tiny shapes: every row is printed, or says why it was not run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def long_shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("long_shapes")


def run(*words: str) -> str:
    words = (
        sys.executable,
        str(BENCHMARKS / "bench_head_loss.py"),
        "--long",
        "--width",
        "32",
        "--vocab",
        "1000",
        *words,
    )
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_every_row_with_its_ratio_and_what_is_lost_where(long_shapes: ModuleType) -> None:
    printed = run("--tokens", "24", "40", "--rounds", "2")
    for row in long_shapes.ROWS:
        assert printed.count(f"| {row.name} |") == 4
    for mine, other in long_shapes.PAIRS:
        assert printed.count(f"{mine} / {other}: ") == 2
    shares = [line for line in printed.splitlines() if "products " in line and "casts" in line and "row pass" in line]
    assert len(shares) == 4 * sum(row.is_ours for row in long_shapes.ROWS)


def test_what_would_end_too_late_is_not_run(long_shapes: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    long_shapes.run_long_shapes([24], 32, 1000, rounds=1, minutes=0.0)
    assert capsys.readouterr().out.count("not run") == len(long_shapes.ROWS)


def test_what_does_not_fit_is_not_run(long_shapes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = next(row for row in long_shapes.ROWS if row.token_bytes)
    monkeypatch.setattr(long_shapes, "free_bytes", lambda: 24e9)
    assert "needs" in long_shapes._why_not(eager, 32768, 2048, 131072, {}, float("inf"))
    assert long_shapes._why_not(long_shapes.ROWS[0], 32768, 2048, 131072, {}, float("inf")) is None


def test_the_shares_are_of_the_whole_and_nothing_stays_patched(long_shapes: ModuleType) -> None:
    from zloss.head.products import HeadProducts

    logits_ = HeadProducts.logits_
    problem = long_shapes.make_problem(300, 64, 2000, torch.bfloat16)
    with long_shapes.time_shares() as shares:
        long_shapes.ROWS[0].call(problem)
    assert set(shares) == {*long_shapes.PRODUCTS, "casts", "row pass"}
    assert all(seconds > 0 for seconds in shares.values())
    assert HeadProducts.logits_ is logits_
    line = long_shapes.shares_line({"h Wᵀ": 1.0, "E W": 2.0, "row pass": 1.0}, 10.0)
    assert line == "products 30 %, row pass 10 %, rest 60 %"
