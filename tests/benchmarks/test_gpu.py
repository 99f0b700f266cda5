"""`make gpu` without a GPU: the same code at tiny shapes on the CPU, kernels interpreted, and its message without a device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.against_fp64 import OBJECTIVES, OPTIONS, QUICK, Sweep, make, ways
from benchmarks.gpu.agreement import Way, compared, on_device
from benchmarks.gpu.contenders import CONTENDERS
from benchmarks.gpu.markdown import as_markdown, failure_line, timing_tables
from benchmarks.gpu.record import Checked, GpuReport, law_lines
from benchmarks.gpu.timing import PRODUCTS
from tests.laws.definitions import reference

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def command(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # `make gpu` starts a Python that knows nothing of an interpreter; the command sets it where it is needed.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_command_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'zloss[triton]'")
    words = ("--device", "cpu", "--quick", "--out", str(tmp_path))
    done = command(sys.executable, "-m", "benchmarks.gpu", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (data,), (page,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    report = GpuReport.from_dict(json.loads(data.read_text()))
    assert report.failures == ()
    assert {line.backend for line in report.laws} == {"dense", "chunked", "triton"}
    assert {line.law for line in report.laws} == {
        "every option", "source at the logits", "losses of logits", "autocast", "off is cross-entropy, bit for bit",
        "all tokens ignored", "buffer for dW", "Z of confident tokens", "compiled head loss", "compiled loss of logits",
        "CUDA graph", "gradient checkpointing", "flat memory",
    }  # fmt: skip
    assert [timed.name for timed in report.timings] == [PRODUCTS, *(contender.name for contender in CONTENDERS)]
    assert any(timed.best_ms for timed in report.timings if timed.name == "zloss, default")
    assert page.read_text() == as_markdown(report)
    assert "\n".join(timing_tables(report.timings)) in done.stdout
    assert report.not_run == {}
    assert report.to_dict() == json.loads(data.read_text())


def test_without_a_gpu_it_says_so_in_one_sentence_and_installs_nothing(tmp_path: Path) -> None:
    done = command(sys.executable, "-m", "benchmarks.gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "There is no GPU that torch can use here: run this on a machine with one.\n"
    no_card, venv = tmp_path / "nvidia-smi", tmp_path / "venv"
    no_card.write_text("#!/bin/sh\nexit 9\n")
    no_card.chmod(0o755)
    made = command("make", "gpu", f"GPU_VENV={venv}", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert made.returncode == 2
    assert made.stdout == "make gpu needs a machine with an NVIDIA GPU: nvidia-smi finds none here.\n"
    assert not venv.exists()


def test_a_wrong_gradient_is_a_failure() -> None:
    """The bounds can fail: the same case against the definition of another coefficient, and a case that raises."""
    way = Way(torch.float32, "chunked", "auto")
    case = make(QUICK, "centered", "all", torch.float32)
    other = replace(case, objective=type(case.objective)(0.71))
    right, wrong = (
        compared("law", "case", way, CPU, lambda of=of: (on_device(case, way, CPU, 3), reference(of)))
        for of in (case, other)
    )
    assert right.held
    assert not wrong.held
    raised = compared("law", "case", way, CPU, lambda: on_device(case, replace(way, backend="none"), CPU, 3))
    assert not raised.held
    assert "backend" in failure_line(raised)
    nan = compared("law", "case", way, CPU, lambda: ({"loss": torch.tensor(torch.nan)}, {"loss": torch.tensor(1.0)}))
    assert not nan.held
    lines = law_lines([right, wrong, right])
    assert (lines[0].cases, lines[0].failed, lines[0].worst) == (3, 1, wrong)


def test_one_failure_makes_the_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import __main__ as program
    from benchmarks.gpu import run as runner

    failed = Checked("law", "case", "float32", "chunked", "auto", "loss", 1.0, 1e-5)
    monkeypatch.setattr(runner, "all_laws", lambda *args, **options: iter([failed]))
    # Asking for Triton would import its kernels interpreted, for all tests of this process.
    monkeypatch.setattr(runner, "usable_backends", lambda device: (("chunked",), {"Triton": "left out"}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    words = ["--device", "cpu", "--quick", "--no-timing", "--out", str(tmp_path)]
    assert program.main(words) == 1
    (page,) = tmp_path.glob("*.md")
    assert "Failed property tests" in page.read_text()


def test_when_the_time_is_up_tests_are_listed_as_not_run() -> None:
    from benchmarks.gpu.run import all_laws

    not_run: dict[str, str] = {}
    options = {"quick": True, "calls": 1, "deadline": 0.0, "not_run": not_run, "say": lambda line: None}
    found = list(all_laws(CPU, ("chunked",), **options))
    assert len(found) == len(not_run)  # one case of each
    assert "every option against fp64" in not_run
    assert all("--minutes" in why for why in not_run.values())


def test_the_full_sweep_is_everything() -> None:
    """All objectives and options, three dtypes, all backends and products: what the full run is made of."""
    sweep, backends = Sweep(), ("dense", "chunked", "triton")
    assert set(sweep.objectives) == set(OBJECTIVES)
    assert set(sweep.options) == set(OPTIONS)
    assert sweep.dtypes == (torch.float32, torch.bfloat16, torch.float16)
    found = [(way.backend, way.products) for way in ways(sweep, torch.bfloat16, backends)]
    assert found == [("dense", "auto"), *((b, p) for b in backends[1:] for p in ("auto", "operand", "fp32"))]


def test_the_constraints_of_a_gpu_are_those_of_the_project_but_for_triton() -> None:
    """The CUDA build of torch requires another triton than the one the tests run with."""
    project, gpu = (
        dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line and line[0] != "#")
        for name in ("constraints.txt", "constraints-gpu.txt")
    )
    assert {name for name in gpu if gpu[name] != project.get(name)} == {"triton", "quack-kernels"}
    assert "quack-kernels" not in project  # needs a GPU


def test_contributed_results_open() -> None:
    for file in (ROOT / "docs/results/gpu").glob("*.json"):
        report = GpuReport.from_dict(json.loads(file.read_text()))
        assert file.with_suffix(".md").read_text() == as_markdown(report)
