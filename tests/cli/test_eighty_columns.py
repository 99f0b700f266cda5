"""Every command on a terminal of 80 columns, without colors and piped: nothing is wider, nothing is cut off."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.tiny_models import save_model
from zloss.cli.main import COMMANDS, main

RESULTS = Path(__file__).parents[2] / "docs" / "results"
AUDIT = ["--blocks", "4", "--block-size", "32", "--gradient-blocks", "2", "--no-figures"]
ENOUGH = ["--least-tokens", "100"]
"""Otherwise the suggested next command is the whole line with more blocks."""
TRAIN = ["--steps", "4", "--warmup", "1", "--micro-batch", "1", "--block-size", "16", "--valid-blocks", "8"]
TRAIN += ["--gradient-blocks", "1", "--trackers", "none", "--checkpoint-every", "0"]
MOE = ["--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--expert-width", "16"]
MOE += ["--train-tokenizer", "300", "--router", "none,token_layer_mean,active_route_mean:matched,active_route_sum"]
LOSS = """
import torch.nn.functional as F
def loss(z, y):
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean()
"""

Prints = Callable[..., list[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models and a loss; the results of one command are read by the next."""
    folder = tmp_path_factory.mktemp("eighty")
    for kind in ("gpt2", "gemma2", "mixtral", "neox"):
        save_model(kind, folder / kind)
    for step in (100, 2000):
        shutil.copytree(folder / "gpt2", folder / "run" / f"checkpoint-{step}")
    (folder / "loss.py").write_text(LOSS)
    return folder


@pytest.fixture
def prints(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prints:
    """A function that runs a command, checks every line it prints, and returns the lines."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str, code: int = 0) -> list[str]:
        capfd.readouterr()
        try:
            ended = main(list(words))
        except SystemExit as stop:  # help ends this way
            ended = int(stop.code or 0)
        assert ended == code
        captured = capfd.readouterr()
        lines = [line.rstrip() for line in (captured.out + captured.err).splitlines()]
        wide = [line for line in lines if cell_len(line) > 80]
        assert not wide, wide
        assert not [line for line in lines if re.search(r"\S…", line)], "a cell was cut"
        assert not [line for line in lines if "\x1b" in line], "colors in a pipe"
        return lines

    return run


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, prints: Prints) -> None:
    lines = prints(*([command] if command else []), "--help")
    assert len(lines) > 5


@pytest.mark.parametrize("model", ["gpt2", "gemma2", "mixtral", "neox"])
def test_audit(model: str, prints: Prints) -> None:
    short = prints("audit", model, *AUDIT, *ENOUGH, "--out", f"audit-{model}")
    assert len(short) <= 25
    text = "\n".join(prints("audit", model, *AUDIT, *ENOUGH, "--verbose", "--out", f"audit-{model}"))
    decisions = json.loads(Path(f"audit-{model}/report.json").read_text())["decisions"]
    for decision in decisions:
        assert decision["stage"] in " ".join(text.split())
        if decision["fired"] is not None:
            (line,) = [line for line in text.splitlines() if line[:1] == "●" and decision["stage"] in line]
            assert line.startswith("● fired" if decision["fired"] else "● quiet"), "they differ by a word"
    assert "P_Z^99.9: p99.9 of |log Z − c|, the log-normalizer tail, in nat" in text


def test_train_and_compare(prints: Prints) -> None:
    methods = "ce,factorized"
    prints("train", "gpt2", *TRAIN, "--methods", methods, "--coef", "1e-4,1e-3", "--seeds", "1,2", "--out", "dense")
    assert len(prints("compare", "dense")) <= 25
    text = "\n".join(prints("compare", "dense", "--verbose"))
    assert "clip rate: share of steps" in text
    assert "R_aux: norm of the method's auxiliary gradient" in text
    assert text.count("Factorized, λ 0.001") >= 3
    prints("train", *MOE, *TRAIN, "--out", "moe")
    text = "\n".join(prints("compare", "moe", "--verbose"))
    assert "s_rel: scale of the router Z-loss relative to the token-layer mean" in text


def test_the_rest(prints: Prints) -> None:
    for model in ("gpt2", "gemma2", "mixtral", "neox"):
        if not Path(f"audit-{model}").exists():  # made by the test above
            prints("audit", model, *AUDIT, *ENOUGH, "--out", f"audit-{model}")
    drift = ["--blocks", "8", "--block-size", "128", "--gradient-blocks", "0", "--no-figures", "--out", "drift"]
    assert "P_Z^99.9: p99.9 of |log Z − c|" in "\n".join(prints("drift", "run", *drift))
    assert "in nat" in "\n".join(prints("center", "gpt2", *AUDIT[:4], "--out", "centered"))
    assert "s_rel: scale" in "\n".join(prints("router-scale", "--to", "olmoe", "--verbose", "--out", "scale.json"))
    prints("audit-loss", "loss.py:loss", "--out", "loss", code=1)
    words = ["--blocks", "1", "--block-size", "32", "--implementations", "dense,torch-ce", "--out", "implementation"]
    assert "Δ_θ, Adam error: relative error" in "\n".join(prints("audit-implementation", "gpt2", *words))
    prints("report", "audit-gpt2", "audit-neox", "audit-mixtral", "audit-gemma2", "--out", "four")
    prints("report", "audit-mixtral", "loss", "implementation", "drift", "scale.json", "--out", "all")
    prints("report", "loss", "--out", "page")
    prints("reproduce", "--list")
    prints("report", *(str(RESULTS / f"{name}.json") for name in ("tab_pretrained", "tab_moe")), "--out", "paper")
