"""`zloss audit-implementation` from the outside: files, table, exit codes, and what `zloss report` makes of its result."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.text import pydoc_topics

QUICK = ["--blocks", "2", "--block-size", "24", "--implementations", "dense,torch-ce,chunked-linear", "--coef", "1e-2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gpt2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(pydoc_topics()))
    return path


@pytest.fixture(scope="module")
def result(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an audit and what it printed."""
    out = tmp_path_factory.mktemp("out") / "implementation"
    words = ["audit-implementation", str(model), "--text", str(text), "--out", str(out), *QUICK]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    return out, printed.getvalue()


def stages(folder: Path) -> dict[str, Any]:
    (only,) = json.loads((folder / "decisions.json").read_text())["maps"]
    return {decision["stage"]: decision for decision in only["decisions"]}


def test_the_command_writes_a_record_a_page_and_a_table(result: tuple[Path, str]) -> None:
    folder, printed = result
    record = json.loads((folder / "implementation_audit.json").read_text())
    assert record["schema"] == "zloss.implementation-audit/1"
    assert record["corpus"]["predictions"] == 48
    assert record["provenance"]["command"].startswith("zloss audit-implementation ./")
    assert str(folder.parent) not in json.dumps(record["provenance"])
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Audit of the implementation" in page
    assert "F.cross_entropy + manual Z" in page
    for section in ("Stored logits", "Implementations", "Update", "fp16"):
        assert section in printed
    assert "● fired  Implementation " in printed
    lines = printed.splitlines()
    tables = [line for line in lines if not line.startswith("/") and "●" not in line and "○" not in line]
    assert max(len(line) for line in tables[:-1]) <= 80
    assert "…" not in printed


def test_report_reads_it_and_both_stages_see_it(result: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = result
    assert main(["report", str(folder), "--out", str(tmp_path), "--quiet"]) == 0
    decided = stages(tmp_path)
    implementation = decided["Implementation"]
    assert implementation["fired"] is True
    assert "stored in bf16" in implementation["reason"]
    assert "Δ_θ" in implementation["reason"]
    # A margin within its limit says nothing about training runs, so the stage stays open and says both.
    assert decided["Optimizer consequence"]["fired"] is None
    assert "fp16 margin stays within its limit" in decided["Optimizer consequence"]["reason"]
    assert "zloss compare" in decided["Optimizer consequence"]["reason"]
    limits = ["--delta-src", "1", "--delta-theta", "1", "--fp16-margin-ratio", "0.5"]
    assert main(["report", str(folder), "--out", str(tmp_path), "--quiet", *limits]) == 0
    decided = stages(tmp_path)
    assert decided["Implementation"]["fired"] is False
    assert decided["Optimizer consequence"]["fired"] is True
    assert "κ" in decided["Optimizer consequence"]["reason"]
    assert decided["Optimizer consequence"]["measured"]


def test_quiet_is_quiet(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quiet", "--update-blocks", "0", "--overflow-blocks", "0", "--implementations", "none", "--blocks", "1"]
    assert main(["audit-implementation", str(model), "--block-size", "16", "--out", str(tmp_path), *words]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "no model 'nowhere'"),
        (["MODEL", "--implementations", "lige"], "Did you mean 'liger'?"),
        (["MODEL", "--methods", "ce,standrad"], "Did you mean 'standard'?"),
        (["MODEL", "--device", "mps"], "--device is expected"),
        (["MODEL", "--logit-scales", "0"], "--logit-scales are expected"),
        (["MODEL", "--blocks", "0"], "--blocks is expected"),
        (["MODEL", "--blocks", "100000"], "use fewer blocks"),
        (["MODEL", "--out", "/dev/null/x"], "Set it with --out"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(
    words: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(model) if word == "MODEL" else word for word in words]
    out = [] if "--out" in words else ["--out", str(tmp_path)]
    assert main(["audit-implementation", *words, *out]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_ctrl_c_leaves_a_partial_record_and_exit_code_130(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zloss.audit.implementation.run.update_audit", interrupt)
    assert main(["audit-implementation", str(model), "--out", str(tmp_path), *QUICK]) == 130
    record = json.loads((tmp_path / "implementation_audit.json").read_text())
    assert record["status"] == "partial"
    assert record["source"]
    assert record["overflow"] == []
    assert "interrupted" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--quiet"]) == 0


def test_help_needs_no_torch_and_gives_an_example() -> None:
    code = (
        "import sys; from zloss.cli.main import main\n"
        "try: main(['audit-implementation', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.replace("│", " ").split())
    assert "Example: zloss audit-implementation smollm2 --text valid.txt" in words
    assert all(flag in done.stdout for flag in ("--precision", "--blocks", "--device", "--out", "--quiet"))
