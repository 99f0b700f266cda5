"""`zloss router-scale`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tyro

from tests.cli.conftest import Refused
from zloss.cli.audit import RouterScale
from zloss.cli.main import main
from zloss.results.files import read_record
from zloss.results.router import RouterScaleTable
from zloss.router.conventions import router_conventions


def run(*words: str) -> int:
    return tyro.cli(RouterScale, args=list(words)).run([])


def test_converts_and_lists_every_convention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("--coef", "1e-3", "--from", "megatron", "--to", "olmoe", "--layers", "16", "--top-k", "8") == 0
    printed = capsys.readouterr().out
    assert "0.001 under megatron = 0.128 under olmoe" in printed
    # A coefficient alone is not Megatron's penalty: its target is 0, the default here is log E.
    assert "pass target=0.0" in printed
    rows = {
        line.split()[0]: line.split()[1:]
        for line in printed.splitlines()
        if line.startswith(" ") and len(line.split()) == 4
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


def test_the_output_fits_eighty_columns_with_a_legend(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be ninety lines by default, with paths broken inside words and no explanation of s_rel."""
    monkeypatch.setenv("COLUMNS", "80")
    run("--layers", "8", "--encoder-layers", "3", "--to", "olmoe")
    brief = capsys.readouterr().out.splitlines()
    run("--layers", "8", "--encoder-layers", "3", "--to", "olmoe", "--verbose")
    full = capsys.readouterr().out.splitlines()
    assert len(brief) < 40
    assert max(len(line) for line in (*brief, *full)) <= 80
    assert any(line.startswith("s_rel: scale of the router Z-loss relative to the token-layer mean") for line in brief)
    assert any(line.startswith("(mean): layers have different scales") for line in brief)
    words = " ".join(full).split()
    for convention in router_conventions():
        assert all(word in words for word in convention.cited.split())
    assert not any("Megatron-LM" in line for line in brief)


def test_the_result_is_written_and_evaluates_the_router_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--coef", "1e-2", "--from", "megatron", "--layers", "4", "--top-k", "2", "--out")
    assert run(*arguments, str(tmp_path / "folder")) == 0
    assert str(tmp_path / "folder" / "router_scale.json") in capsys.readouterr().out
    assert run(*arguments, str(tmp_path / "named.json")) == 0
    table = read_record(tmp_path / "named.json", RouterScaleTable)
    assert (table.coef, table.source, table.scale("megatron").relative) == (1e-2, "megatron", 4.0)
    assert read_record(tmp_path / "folder" / "router_scale.json", RouterScaleTable) == table
    capsys.readouterr()
    assert main(["report", str(tmp_path / "folder")]) == 0
    printed = capsys.readouterr().out
    assert "s_rel = 4 under megatron" in printed
    assert "s_rel: scale of the router Z-loss" in printed
    page = (tmp_path / "folder" / "report.html").read_text(encoding="utf-8")
    assert "Scale of a router Z-loss" in page
    assert "NVIDIA/Megatron-LM" in page
    (only,) = json.loads((tmp_path / "folder" / "decisions.json").read_text())["maps"]
    stage = next(decision for decision in only["decisions"] if decision["stage"] == "Router reduction")
    assert stage["fired"] is True
    assert stage["value"] == 4.0
    assert [effect["after"] for effect in stage["measured"]] == [2.5e-3]


@pytest.mark.parametrize("content", ['{"name": "somebody else\'s"}', "not JSON", '{"schema": "zloss.audit/1"}', ""])
def test_a_file_of_somebody_else_was_replaced(tmp_path: Path, content: str, refused: Refused) -> None:
    file, folder = tmp_path / "package.json", tmp_path / "folder"
    folder.mkdir()
    for place, out in ((file, file), (folder / "router_scale.json", folder)):
        place.write_text(content)
        refused(["router-scale", "--out", out], f"{place.name}, which is not a router scale of zloss", "--force")
        assert place.read_text() == content
        assert main(["router-scale", "--out", str(out), "--force"]) == 0
        assert read_record(place, RouterScaleTable).coef == 1e-3
        assert main(["router-scale", "--out", str(out), "--coef", "1e-2"]) == 0, "its own result may be replaced"
    (tmp_path / "text.txt").write_text("text")
    refused(["router-scale", "--out", tmp_path / "text.txt"], "cannot write")
    assert (tmp_path / "text.txt").read_text() == "text"
