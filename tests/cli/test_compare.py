"""`zloss compare` on real runs: pairs, differences, verdicts, the page."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_run import SCRATCH, some_text
from zloss.cli.main import main
from zloss.report.text.numbers import number


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four methods, two coefficients, two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    text = folder / "text.txt"
    text.write_text(some_text(), encoding="utf-8")
    words = [
        "train",
        *SCRATCH,
        "--methods",
        "ce,centered-head,standard,centered",
        "--coef",
        "0.3,1e-4",
        "--seeds",
        "1,2",
    ]
    words += [
        "--untie",
        "--head-shift",
        "30",
        "--lr",
        "1e-3",
        "--steps",
        "15",
        "--text",
        str(text),
        "--trackers",
        "none",
    ]
    assert main([*words, "--checkpoint-every", "0", "--out", str(folder / "out"), "--quiet"]) == 0
    return folder / "out"


def metrics(runs: Path, name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((runs / name / "metrics.json").read_text())
    return data


def test_differences_are_paired_and_judged_in_one_coordinate(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--tolerance-ppl", "1000"]) == 0
    printed = capsys.readouterr().out
    data = json.loads((runs / "comparison.json").read_text())
    assert data["schema"] == "zloss.comparison/1"
    assert data["baseline"] == "ce"
    assert data["methods"][0]["method"] == "ce"
    assert data["methods"][0]["paired"] is None
    assert len(data["methods"]) == 6

    ppl = {name: [metrics(runs, f"{name}-s{seed}")["ppl"] for seed in (1, 2)] for name in ("ce-0", "standard-0.3")}
    standard = next(m for m in data["methods"] if (m["method"], m["coef"]) == ("standard", 0.3))
    assert standard["metrics"]["ppl"]["mean"] == pytest.approx(statistics.fmean(ppl["standard-0.3"]))
    assert standard["metrics"]["ppl"]["std"] == pytest.approx(statistics.stdev(ppl["standard-0.3"]))
    gaps = [a - b for a, b in zip(ppl["standard-0.3"], ppl["ce-0"], strict=True)]
    verdicts = {(q["method"], q["coef"]): q for q in data["quality"]["methods"]}
    assert verdicts["standard", 0.3]["delta_ppl"] == pytest.approx(statistics.fmean(gaps))
    paired = standard["paired"]
    assert paired["deployed"]["ppl"]["by_seed"] == pytest.approx(gaps)
    # A strong raw penalty pulls the shifted head in, in its own coordinate.
    assert verdicts["standard", 0.3]["improves"] is True
    assert verdicts["standard", 0.3]["accepted"] is True
    # Centering alone changes no run: nothing to accept beyond quality, and no difference in the same coordinate.
    head = next(m["paired"] for m in data["methods"] if m["method"] == "centered-head")
    assert head["same_coordinate"]["raw"]["p_z_999"]["mean"] == 0
    assert head["deployed"]["p_z_999"]["mean"] < -10
    assert all(part["first_difference"] is None for part in head["trajectory"])
    assert verdicts["centered-head", 0.0]["accepted"] is None
    assert data["tokens"]["consumed"] == 15 * 2 * 24
    for word in ("accepted", "reuse factor", "equal bit for bit", "standard 0.3", "comparison.json"):
        assert word in printed
    page = (runs / "report.html").read_text()
    assert "standard" in page
    assert page.count('<svg class="chart"') >= 3
    assert page.index('id="comparisons"') < page.index("Paired differences") < page.index("Gradient norm tail")
    assert page.count("<footer>") == 1


def test_a_tolerance_can_reject(runs: Path) -> None:
    assert main(["compare", str(runs), "--tolerance-ppl", "-1000", "--quiet"]) == 0
    data = json.loads((runs / "comparison.json").read_text())
    assert {q["accepted"] for q in data["quality"]["methods"] if q["coef"]} == {False}
    assert main(["compare", str(runs), "--quiet"]) == 0
    data = json.loads((runs / "comparison.json").read_text())
    ce = statistics.fmean(metrics(runs, f"ce-0-s{seed}")["ppl"] for seed in (1, 2))
    assert data["quality"]["tolerance_ppl"] == pytest.approx(0.01 * ce)


def test_a_comparison_joins_a_report(runs: Path, tmp_path: Path) -> None:
    assert main(["compare", str(runs), "--quiet"]) == 0
    assert main(["report", str(runs / "comparison.json"), "--out", str(tmp_path / "page"), "--quiet"]) == 0
    assert (tmp_path / "page" / "report.html").read_text() == (runs / "report.html").read_text()
    stages = json.loads((tmp_path / "page" / "decisions.json").read_text())["maps"][0]["decisions"]
    evaluated = {stage["stage"]: stage["fired"] for stage in stages}
    assert sum(fired is not None for fired in evaluated.values()) >= 2


def test_the_markdown_page_has_the_numbers_of_the_json_file(runs: Path) -> None:
    assert main(["compare", str(runs), "--quiet"]) == 0
    data, page = json.loads((runs / "comparison.json").read_text()), (runs / "comparison.md").read_text()
    for method in data["methods"]:
        assert number(method["metrics"]["ppl"]["mean"]) in page
    for record in data["quality"]["methods"]:
        assert record["reason"] in page
        assert number(record["delta_ppl"]) in page
    assert data["provenance"]["runs"] == sum(len(method["seeds"]) for method in data["methods"])
    assert str(runs) not in page


def test_unmatched_pairs_are_refused_by_field(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs, copy)
    file = copy / "standard-0.3-s2" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "target": 0.0, "gain_beta": 0.5}))
    assert main(["compare", str(copy), "--quiet"]) == 0
    for change, named in (
        ({"lr": 2e-3}, "lr (0.001 → 0.002)"),
        (
            {"data": {**config["data"], "train": {**config["data"]["train"], "fingerprint": "x"}}},
            "data.train.fingerprint",
        ),
    ):
        file.write_text(json.dumps({**config, **change}))
        assert main(["compare", str(copy), "--quiet"]) == 2
        assert named in capsys.readouterr().err


def test_means_are_of_one_experiment_also_without_partners(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs, copy)
    shutil.rmtree(copy / "ce-0-s2")
    assert main(["compare", str(copy), "--quiet"]) == 0
    data = json.loads((copy / "comparison.json").read_text())
    assert all(
        method["seeds"] == [1] for method in data["methods"]
    )  # seed 2 has no baseline: it stays out of the means
    file = copy / "standard-0.3-s2" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lr": 2e-3}))
    assert main(["compare", str(copy), "--quiet"]) == 2
    assert "lr (0.001 → 0.002)" in capsys.readouterr().err
    file.write_text(json.dumps(config))
    shutil.copytree(copy / "standard-0.3-s1", copy / "standard-copied")
    assert main(["compare", str(copy), "--quiet"]) == 2
    assert "the same run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"), [("metrics.json", "{}"), ("steps.jsonl", "{"), ("steps.jsonl", None), ("config.json", "[]")]
)
def test_damaged_runs_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs, copy)
    damaged = copy / "standard-0.3-s1" / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_text(content)
    assert main(["compare", str(copy), "--quiet"]) == 2
    assert file in capsys.readouterr().err
    assert main(["compare", str(runs), "--tolerance-ppl", "nan"]) == 2


def test_a_short_run_shows_the_maximum_and_no_p99(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs)]) == 0
    out, page = capsys.readouterr().out, (runs / "comparison.md").read_text()
    assert json.loads((runs / "comparison.json").read_text())["steps"] < 100
    assert "max ‖g‖" in out
    assert "p99 ‖g‖" not in out + page


def test_missing_parts_are_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs, copy)
    (copy / "centered-0.3-s2" / "metrics.json").unlink()
    shutil.rmtree(copy / "ce-0-s1")
    assert main(["compare", str(copy)]) == 0
    data = json.loads((copy / "comparison.json").read_text())
    assert data["unfinished"] == ["centered-0.3-s2"]
    assert "standard-0.3-s1" in data["unpaired"]
    lonely = next(q for q in data["quality"]["methods"] if (q["method"], q["coef"]) == ("centered", 0.3))
    assert lonely["accepted"] is None
    for words, sentence in (
        ([str(copy), "--baseline", "factorized"], "no run of the baseline"),
        ([str(copy), "--baseline", "standard"], "name one of standard:0.0001, standard:0.3"),
        ([str(tmp_path / "nowhere")], "there is no folder"),
        ([str(copy), "--diagnosed", "nonsense"], "no diagnosed quantity"),
    ):
        assert main(["compare", *words]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["compare", str(copy), "--baseline", "standard:0.3", "--quiet"]) == 0
