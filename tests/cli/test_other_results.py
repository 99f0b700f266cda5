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
