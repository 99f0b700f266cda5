"""`--out` over the results of something else: refused by its name, replaced with --force, never mixed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tests.decide.made_up_recommendation import made_up_recommendation
from tests.tiny_models import save_model
from zloss.cli.main import main
from zloss.decide.answer import decide_results
from zloss.report.files import write_result

SMALL = ["--blocks", "2", "--block-size", "16", "--gradient-blocks", "0"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: save_model("gpt2", root / name, seed=seed) for seed, name in enumerate(("first", "second"))}
    return made | {"twin": Path(shutil.copytree(made["second"], root / "deeper" / "first"))}


def audit(model: Path, out: Path, *more: str) -> int:
    return main(["audit", str(model), *SMALL, "--out", str(out), "--quiet", *more])


def test_another_model_s_audit_is_not_overwritten(models: dict[str, Path], tmp_path: Path, refused: Refused) -> None:
    assert audit(models["first"], tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in ("second", "twin"):
        refused(["audit", models[other], *SMALL, "--out", tmp_path], "holds an audit of first on pydoc", "--force")
    text = tmp_path.parent / "other.txt"
    text.write_text("Some words of another text. " * 200)
    again = ["audit", models["first"], *SMALL, "--text", text, "--out", tmp_path]
    refused(again, "this is an audit of first on other.txt")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_with_force_nothing_of_the_other_one_stays(models: dict[str, Path], tmp_path: Path) -> None:
    assert audit(models["first"], tmp_path) == 0
    assert main(["report", str(tmp_path), "--quiet"]) == 0
    assert (tmp_path / "figures").is_dir()
    assert (tmp_path / "decisions.json").is_file()
    assert audit(models["second"], tmp_path, "--force", "--no-figures") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "tokens.parquet"]
    assert json.loads((tmp_path / "report.json").read_text())["model"]["name"].endswith("second")


def test_the_same_model_and_text_may_be_audited_again(models: dict[str, Path], tmp_path: Path) -> None:
    assert audit(models["first"], tmp_path) == 0
    assert audit(models["first"], tmp_path, "--no-figures", "--seed", "1") == 0
    assert not (tmp_path / "figures").exists(), "figures of the earlier audit beside the report of the new one"


def test_a_recommendation_is_not_overwritten(models: dict[str, Path], tmp_path: Path, refused: Refused) -> None:
    write_result(tmp_path, decide_results(recommendations=(made_up_recommendation(),)))
    said = "holds a recommendation for tiny <model> on a text, and this is an audit of first"
    refused(["audit", models["first"], *SMALL, "--out", tmp_path], said)


def test_other_kinds_of_results_are_not_mixed(models: dict[str, Path], tmp_path: Path, refused: Refused) -> None:
    held, elsewhere = tmp_path / "held", tmp_path / "elsewhere"
    assert audit(models["first"], held, "--no-figures") == 0
    assert audit(models["second"], elsewhere, "--no-figures") == 0
    loss = tmp_path / "loss.py"
    loss.write_text("import torch.nn.functional as F\ndef loss(z, y):\n    return F.cross_entropy(z, y)\n")
    run = tmp_path / "run"
    for step in ("1", "2"):
        shutil.copytree(models["first"], run / f"checkpoint-{step}")
    for words in (
        ["audit-loss", f"{loss}:loss"],
        ["audit-implementation", models["first"], "--blocks", "1", "--implementations", "none"],
        ["drift", run, "--blocks", "8", "--block-size", "128"],
        ["recommend", models["first"]],
        ["report", elsewhere],
    ):
        refused([*words, "--out", held], "holds an audit of first on pydoc")
    refused(["compare", held], "holds an audit of first on pydoc, and this is a comparison of training runs", "--force")
    assert main(["report", str(elsewhere), "--out", str(held), "--force", "--quiet"]) == 0
    assert not (held / "report.json").exists()


LOSS = "import torch.nn.functional as F\ndef loss(z, y):\n    return F.cross_entropy(z, y)\n"
FOREIGN = {
    "report.json": ['{"coverage": 91}', "[]", "not JSON", '{"schema": "other.audit/1"}', ""],
    "report.html": ["<!doctype html><title>Coverage</title>"],
    "decisions.json": ['{"schema": 1}'],
    "tokens.parquet": ["PAR1 of somebody else PAR1"],
    "comparison.md": ["# My comparison"],
    "figures/spectrum.png": ["my picture"],
    "figures/model/tails.svg": ["<svg/>"],
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in FOREIGN.items() for text in texts])
def test_a_file_of_somebody_else_was_replaced_or_removed(
    models: dict[str, Path], tmp_path: Path, name: str, content: str, refused: Refused
) -> None:
    """Only results of zloss were looked for, so any other file of these names was lost without --force."""
    loss, run, out = tmp_path / "loss.py", tmp_path / "run", tmp_path / "out"
    loss.write_text(LOSS)
    for step in ("1", "2"):
        shutil.copytree(models["first"], run / f"checkpoint-{step}")
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text(content)
    said = f"holds {name}, which is not a result of zloss: choose another folder, or pass --force to replace it"
    commands = [["audit-loss", f"{loss}:loss"]]
    if content in ("not JSON", "[]") or name != "report.json":
        commands.append(["audit", models["first"], *SMALL])
    if name != "report.json":  # these have a record of another name
        commands += [
            ["audit-implementation", models["first"], "--blocks", "1", "--implementations", "none"],
            ["drift", run, "--blocks", "8", "--block-size", "128"],
            ["recommend", models["first"]],
        ]
    for words in commands:
        refused([*words, "--out", out], said)
        assert [path for path in out.rglob("*") if path.is_file()] == [out / name]
        assert (out / name).read_text() == content


def test_files_of_somebody_else_are_replaced_with_force_alone(tmp_path: Path, refused: Refused) -> None:
    loss, out = tmp_path / "loss.py", tmp_path / "out"
    loss.write_text(LOSS)
    out.mkdir()
    for name in ("report.json", "report.html", "mine.txt"):
        (out / name).write_text("{}")
    command = ["audit-loss", f"{loss}:loss", "--quiet", "--out", str(out)]
    refused(command, "holds report.json and report.html, which are not results of zloss", "--force to replace them")
    assert main([*command, "--force"]) == 0
    assert json.loads((out / "report.json").read_text())["schema"] == "zloss.loss-audit/2"
    assert (out / "mine.txt").read_text() == "{}"
    assert main(command) == 0, "its own result may be replaced"


def test_a_page_of_somebody_else_was_replaced_by_a_report(
    models: dict[str, Path], tmp_path: Path, refused: Refused
) -> None:
    """In the folder of the result itself, and in another one."""
    held, elsewhere = tmp_path / "held", tmp_path / "elsewhere"
    held.mkdir()
    elsewhere.mkdir()
    assert main(["router-scale", "--out", str(held)]) == 0
    for folder in (held, elsewhere):
        page = folder / "report.html"
        page.write_text("<title>mine</title>")
        refused(["report", held, "--out", folder], "holds report.html, which is not a result of zloss", "--force")
        assert page.read_text() == "<title>mine</title>"
        page.unlink()
        for _ in range(2):
            assert main(["report", str(held), "--out", str(folder), "--quiet"]) == 0


def test_what_a_killed_command_left_is_not_of_somebody_else(models: dict[str, Path], tmp_path: Path) -> None:
    """An audit that wrote some of its files, in any order, and is run again."""
    assert audit(models["first"], tmp_path / "whole") == 0
    for kept in (
        ["tokens.parquet"],
        ["report.json"],
        ["report.html"],
        ["report.json", "figures"],
        ["report.html", "figures"],
    ):
        out = Path(shutil.copytree(tmp_path / "whole", tmp_path / "-".join(kept)))
        for path in out.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert audit(models["first"], out) == 0
