"""`zloss train --moe`, and `zloss compare` on its runs."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_run import some_text
from zloss.cli.main import main

TINY = [
    *("--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--expert-width", "16"),
    *("--train-tokenizer", "300", "--block-size", "24", "--valid-blocks", "6", "--micro-batch", "2"),
    *("--steps", "8", "--lr", "3e-3", "--checkpoint-every", "0", "--trackers", "none"),
]
ROUTERS = ("none", "token_layer_mean", "active_route_mean", "active_route_sum", "active_route_sum:matched")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    (folder / "text.txt").write_text(some_text(), encoding="utf-8")
    words = ["train", *TINY, "--router", ",".join(ROUTERS), "--router-coef", "0.1", "--seeds", "1,2"]
    assert main([*words, "--text", str(folder / "text.txt"), "--out", str(folder / "out"), "--quiet"]) == 0
    return folder / "out"


def metrics(runs: Path, name: str) -> dict[str, Any]:
    return json.loads((runs / name / "metrics.json").read_text())


def test_one_folder_per_variant_and_seed(runs: Path) -> None:
    names = {
        f"{router.replace(':', '-')}-{0 if router == 'none' else 0.1}-s{seed}" for router in ROUTERS for seed in (1, 2)
    }
    assert {path.name for path in runs.iterdir() if path.is_dir()} == names
    config = json.loads((runs / "active_route_sum-matched-0.1-s2" / "config.json").read_text())
    assert (config["method"], config["coef"], config["seed"]) == ("ce", 0.0, 2)
    assert (config["moe"]["router"], config["moe"]["router_coef"]) == ("active_route_sum:matched", 0.1)
    found = metrics(runs, "active_route_sum-matched-0.1-s2")
    assert (found["s_rel"], found["router"]["applied_coef"]) == (1.0, 0.05)
    assert {"entropy", "load_cv", "router_absolute", "ppl", "ce", "load_balance", "router_z"} <= found.keys()


def test_variants_are_compared_with_the_token_layer_mean(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--verbose"]) == 0
    printed = capsys.readouterr().out
    for word in ("entropy", "load CV", "s_rel", "max |ΔL|", "about k at balance"):
        assert word in printed
    assert "…" not in printed
    data = json.loads((runs / "comparison.json").read_text())
    assert (data["baseline"], data["baseline_coef"]) == ("token_layer_mean", 0.1)
    assert len(data["methods"]) == 5
    # N_tl of a step: 2 layers of 2 blocks of 24 tokens.
    assert (data["router"]["top_k"], data["router"]["decisions"]) == (2, 2 * 2 * 24)
    by_name = {record["convention"]: record for record in (*data["router"]["conventions"], *data["router"]["off"])}
    assert {name: record["s_rel"] for name, record in by_name.items()} == {
        "none": 0.0, "token_layer_mean": 1.0, "active_route_mean": 0.5, "active_route_sum": 2.0,
        "active_route_sum:matched": 1.0,
    }  # fmt: skip
    assert by_name["active_route_sum"]["entropy"] == [
        metrics(runs, f"active_route_sum-0.1-s{s}")["entropy"] for s in (1, 2)
    ]
    losses = {
        name: [json.loads(line)["loss"] for line in (runs / f"{name}-0.1-s2" / "steps.jsonl").read_text().splitlines()]
        for name in ("token_layer_mean", "active_route_sum")
    }
    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert by_name["active_route_sum"]["max_loss_difference"][1] == gap > 1e-4
    assert max(by_name["active_route_sum:matched"]["max_loss_difference"]) <= 1e-6
    unmatched = next(m for m in data["methods"] if m["method"] == "active_route_sum")
    want = [
        metrics(runs, f"active_route_sum-0.1-s{s}")["entropy"] - metrics(runs, f"token_layer_mean-0.1-s{s}")["entropy"]
        for s in (1, 2)
    ]
    assert unmatched["paired"]["deployed"]["entropy"]["mean"] == pytest.approx(statistics.fmean(want))
    # A variant is rejected for its scale; without a router loss there is nothing to judge.
    verdicts = {q["method"]: q["verdict"] for q in data["quality"]["methods"]}
    assert verdicts["active_route_sum"] == verdicts["active_route_mean"] == "rejected"
    assert verdicts["active_route_sum:matched"] == "inconclusive"
    assert verdicts["none"] is None


def test_the_page_has_the_routers_and_their_curves(runs: Path, tmp_path: Path) -> None:
    assert main(["compare", str(runs), "--quiet"]) == 0
    page = (runs / "report.html").read_text()
    assert page.index('id="comparisons"') < page.index("Router losses") < page.index("Router entropy of each step")
    assert "Expert load of each step" in page
    assert page.count("<figure data-name=") >= 5
    assert main(["report", str(runs / "comparison.json"), "--out", str(tmp_path / "page"), "--quiet"]) == 0
    assert (tmp_path / "page" / "report.html").read_text() == page
    stages = json.loads((tmp_path / "page" / "decisions.json").read_text())["maps"][0]["decisions"]
    (router,) = (stage for stage in stages if "router" in stage["stage"].lower())
    assert (router["fired"], router["value"]) == (True, 2.0)


def test_a_baseline_may_be_a_matched_variant(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none", "active_route_sum:matched", "active_route_sum:matched:0.1"):
        assert main(["compare", str(runs), "--baseline", name, "--quiet"]) == 0
        assert json.loads((runs / "comparison.json").read_text())["baseline"] == name.removesuffix(":0.1")
    assert main(["compare", str(runs), "--baseline", "active_route_sum:strong"]) == 2
    assert "METHOD:COEFFICIENT" in capsys.readouterr().err


def test_only_the_router_variant_may_differ(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs, copy)
    file = copy / "active_route_sum-0.1-s2" / "config.json"
    config = json.loads(file.read_text())
    for field in ("load_balance", "top_k", "router_target"):
        file.write_text(json.dumps({**config, "moe": {**config["moe"], field: 3}}))
        assert main(["compare", str(copy), "--quiet"]) == 2
        error = capsys.readouterr().err
        assert f"moe.{field}" in error
        assert "Only the router variant, method, its coefficient" in error
