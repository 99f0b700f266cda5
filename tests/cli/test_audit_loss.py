"""`zloss audit-loss`: the code it prints runs, and stdout has a written test alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from zloss.cli.main import main

LOSSES = """
import torch
from zloss.audit.loss.checks import CHECKS

two_precisions = CHECKS["inconsistent_softmax"].has
in_chunks = CHECKS["chunk_accumulation"].has
overwrites = CHECKS["overwrites_input"].has
padded = CHECKS["padding_in_log_z"].has
"""


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ("two_precisions --linear", "inconsistent_softmax"),
        ("in_chunks --linear", "chunk_accumulation"),
        ("overwrites --logit-scale 2", "overwrites_input"),
        ("padded --valid-vocab 80", "padding_in_log_z"),
    ],
)
def test_the_printed_code_draws_the_input_of_the_witness_again(
    words: str, id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It knew neither heads in 16 bits nor scaled logits nor padding rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text(LOSSES)
    main(["audit-loss", *f"losses.py:{words} --verbose".split()])
    printed = capsys.readouterr().out
    lines = [line[2:] for line in printed[printed.index("  # ") :].splitlines()]
    snippets = dict(part.split("\n", 1) for part in "\n".join(lines).split("# ")[1:])
    exec(snippets[id], {})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("error of the row sums" if "--linear" in words else "value ")
    assert "nan" not in first
    assert "expected" in last


def test_a_written_test_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "losses.py").write_text(
        "print('imported')\nimport torch.nn.functional as F\ndef f(z, y):\n    return F.cross_entropy(z, y)\n"
    )
    out = tmp_path / "out"
    assert main(["audit-loss", f"{tmp_path}/losses.py:f", "--write-test", "--strict", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    compile(printed, "test_written.py", "exec")
    assert printed.startswith('"""Written by')
    assert "all_ignored_nonfinite" in printed
    assert (out / "report.json").exists()
