"""The record of benchmarks: figures with ceilings and noise, from real commands, as one table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def written(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    out = folder / "benchmarks"
    command = [sys.executable, str(BENCHMARKS / "all.py"), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.with_suffix(".json").exists(), done.stderr
    return done.returncode, json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()


def test_a_command_becomes_rows_of_the_table(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'zloss[triton]'")
    code, record, page = written(tmp_path, "--only", "roofline")
    assert code == 0
    (result,) = record["results"]
    assert len(result["figures"]) == 4
    assert all(figure["value"] <= figure["ceiling"] for figure in result["figures"])
    assert "| H100: operand / three 16-bit products |" in page
    assert "cores" in record["machine"]


def test_a_figure_fails_only_beyond_its_noise() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from ceilings import Figure, ratio
        from interleaved import Timing
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert Figure("a", 1.0, 1.0).met
    assert not Figure("a", 1.04, 1.0).met
    assert Figure("a", 1.04, 1.0, noise=0.05).within_noise
    assert not Figure("a", 1.04, 1.0, noise=0.03).within_noise
    steady, shaky = Timing((1.0, 1.0, 1.0, 1.0)), Timing((1.0, 1.2, 1.1, 1.3))
    assert ratio("a", shaky, steady, 1.0).noise == pytest.approx(0.2)
    assert ratio("a", steady, steady, 1.0).noise == 0


def test_the_contenders_of_the_training_benchmarks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the recorder's benchmark used an attribute that was gone, and no test ran it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    steps, integrations, llama = map(importlib.import_module, ("bench_train_step", "bench_integrations", "llama"))
    monkeypatch.setattr(steps, "llama", lambda vocab, *_: llama.llama(vocab, 32, 64, 1, 2, 2))
    step = steps.Step(blocks=1)
    small = integrations.Step(llama.llama(256, 32, 64, 1, 2, 2), 16)
    for run in (step.plain, step.eager, step.recorded()):
        before = step.model.lm_head.weight.detach().clone()
        run()
        assert not torch.equal(before, step.model.lm_head.weight)
    for make in (integrations.with_telemetry, integrations.without_telemetry, integrations.applied):
        make(small)()
