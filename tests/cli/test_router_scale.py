"""`zloss router-scale`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tyro

from zloss.cli.router_scale import RouterScale
from zloss.errors import InputError, UnknownNameError
from zloss.source.router.catalog import router_conventions


def run(*words: str) -> int:
    return tyro.cli(RouterScale, args=list(words)).run()


def test_converts_and_lists_every_convention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("--coef", "1e-3", "--from", "megatron", "--to", "olmoe", "--layers", "16", "--top-k", "8") == 0
    printed = capsys.readouterr().out
    assert "0.001 under megatron = 0.128 under olmoe" in printed
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:5]]
        for line in printed.splitlines()
        if line.count("│") > 4
    }
    assert {convention.name for convention in router_conventions()} <= set(rows)
    assert rows["olmoe"][::2] == ["0.125", "0.128"]
    assert rows["megatron"] == ["16", "2.441e-07", "0.001"]
    assert rows["lm_engine"][0] == "1.6"
    assert rows["hf_nllb_moe"][::2] == ["0", "none"]


def test_options_reach_the_scale(capsys: pytest.CaptureFixture[str]) -> None:
    run("--from", "olmo_core", "--to", "token_layer_mean", "--layers", "8", "--model-layers", "16", "--coef", "1")
    assert "1 under olmo_core = 0.5 under token_layer_mean" in capsys.readouterr().out
    run("--from", "hf_switch", "--to", "token_layer_mean", "--layers", "8", "--encoder-layers", "4", "--coef", "1")
    assert "1 under hf_switch = 2 under token_layer_mean" in capsys.readouterr().out
    run("--from", "megatron_unscaled", "--to", "megatron", "--layers", "2", "--micro-batches", "8", "--coef", "1")
    assert "1 under megatron_unscaled = 8 under megatron" in capsys.readouterr().out


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'megatron'"):
        run("--from", "megatrn")
    with pytest.raises(UnknownNameError, match="Did you mean 'olmoe'"):
        run("--to", "olmoee")
    with pytest.raises(InputError, match="`top_k`"):
        run("--top-k", "0")


def test_needs_no_torch() -> None:
    code = (
        "import sys, tyro; from zloss.cli.router_scale import RouterScale; "
        "tyro.cli(RouterScale, args=['--to', 'olmoe']).run(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
