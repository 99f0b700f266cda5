"""`zloss compare` on real runs: pairs, differences, verdicts, the page."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

import zloss_paper
from tests.cli.conftest import Refused
from tests.train.tiny_run import SCRATCH, some_text, tiny_config
from zloss.cli.main import main
from zloss.report.numbers import number
from zloss.train.grid import Grid, run_grid
from zloss.train.options import RunOptions


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four methods, two coefficients, two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    text = folder / "text.txt"
    text.write_text(some_text(), encoding="utf-8")
    options = (
        "--methods ce,centered-head,standard,centered --coef 0.3,1e-4 --seeds 1,2 --untie --head-shift 30 --lr 1e-3"
    )
    options += f" --steps 15 --text {text} --trackers none --checkpoint-every 0 --out {folder / 'out'} --quiet"
    assert main(["train", *SCRATCH, *options.split()]) == 0
    return folder / "out"


@pytest.fixture
def copy(runs: Path, tmp_path: Path) -> Path:
    """All runs, to be changed."""
    return Path(shutil.copytree(runs, tmp_path / "copy"))


def metrics(runs: Path, name: str) -> dict[str, Any]:
    return json.loads((runs / name / "metrics.json").read_text())


def test_differences_are_paired_and_judged_in_one_coordinate(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--tolerance-ppl", "1000", "--verbose"]) == 0
    printed = capsys.readouterr().out
    data = json.loads((runs / "comparison.json").read_text())
    assert (data["schema"], data["model"], data["baseline"]) == ("zloss.comparison/1", "tiny from scratch", "ce")
    assert len(data["methods"]) == 6
    assert (data["methods"][0]["method"], data["methods"][0]["paired"]) == ("ce", None)

    ppl = {name: [metrics(runs, f"{name}-s{seed}")["ppl"] for seed in (1, 2)] for name in ("ce-0", "standard-0.3")}
    standard = next(m for m in data["methods"] if (m["method"], m["coef"]) == ("standard", 0.3))
    assert standard["metrics"]["ppl"]["mean"] == pytest.approx(statistics.fmean(ppl["standard-0.3"]))
    assert standard["metrics"]["ppl"]["std"] == pytest.approx(statistics.stdev(ppl["standard-0.3"]))
    gaps = [a - b for a, b in zip(ppl["standard-0.3"], ppl["ce-0"], strict=True)]
    assert standard["paired"]["deployed"]["ppl"]["by_seed"] == pytest.approx(gaps)
    verdicts = {(q["method"], q["coef"]): q for q in data["quality"]["methods"]}
    verdict = verdicts["standard", 0.3]
    assert verdict["delta_ppl"] == pytest.approx(statistics.fmean(gaps))
    # A strong raw penalty pulls the shifted head in, in its own coordinate. It does so with gradients a thousand times as
    # large, which rejects it whatever the tolerance.
    assert (verdict["improves"], verdict["verdict"], verdict["accepted"]) == (True, "rejected", False)
    assert verdict["parts"]["optimizer"]["state"] == "fails"
    assert "max ‖g‖₂" in verdict["reasons"][0]
    # Centering alone changes no run: no difference in the same coordinate, and six blocks are too few to judge by.
    head = next(m["paired"] for m in data["methods"] if m["method"] == "centered-head")
    assert head["same_coordinate"]["raw"]["p_z_999"]["mean"] == 0
    assert head["deployed"]["p_z_999"]["mean"] < -10
    assert all(part["first_difference"] is None for part in head["trajectory"])
    verdict = verdicts["centered-head", 0.0]
    assert (verdict["verdict"], verdict["accepted"]) == ("inconclusive", None)
    assert data["tokens"]["consumed"] == 15 * 2 * 24
    for word in ("rejected", "inconclusive", "5 methods compared", "a seed varies the initial weights", "reuse factor"):
        assert word in " ".join(printed.split())
    for word in ("equal bit for bit", "Standard, λ 0.3", "comparison.json"):
        assert word in printed
    below = printed[printed.index("  verdict: inconclusive") :].splitlines()
    assert all(len(line) <= 80 for line in below if not line.startswith(str(runs)))
    page = (runs / "report.html").read_text()
    (verdicts_table,) = re.findall(r'<table class="sortable stacked quality">.*?</table>', page, flags=re.DOTALL)
    assert verdicts_table.count('<td class="prose"') == 3 * 5
    assert page.count("<figure ") >= 3
    assert page.index('id="comparisons"') < page.index("Paired differences") < page.index("Gradient norm tail")
    assert page.count("<footer>") == 1


def test_two_folders_are_one_sentence(runs: Path, refused: Refused) -> None:
    said = "expected one folder of runs, but got 2"
    refused(["compare", runs, "other"], said, "compare each target with CE in its own folder", "method=...")


def test_a_short_comparison_says_what_its_words_mean(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs), "--force"]) == 0
    printed = capsys.readouterr().out
    assert "Accepted: quality" in printed
    assert "inconclusive: not enough runs to tell." in " ".join(printed.split())


def test_an_audit_in_the_folder_of_the_runs_is_not_overwritten(runs: Path, tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder, ignore=shutil.ignore_patterns("comparison.*", "report.html"))
    audit = {"schema": "zloss.audit/1", "model": {"name": "mine"}, "corpus": {"name": "text.txt"}}
    for name, content in (("report.json", json.dumps(audit)), ("report.html", "the page of the audit")):
        (folder / name).write_text(content)
    said = "holds an audit of mine on text.txt, and this is a comparison of training runs"
    refused(["compare", folder, "--quiet"], said, "--force")
    assert (folder / "report.html").read_text() == "the page of the audit"
    assert not (folder / "comparison.json").exists()
    assert main(["compare", str(folder), "--quiet", "--force"]) == 0
    assert not (folder / "report.json").exists()
    assert "the page of the audit" not in (folder / "report.html").read_text()
    assert (folder / "ce-0-s1" / "metrics.json").is_file()


def test_limits_of_the_optimizer_are_options(runs: Path, tmp_path: Path) -> None:
    loose = ["--grad-max-ratio", "1e6", "--event-rate-increase", "1", "--spike-rate-increase", "1"]
    assert main(["compare", str(runs), *loose, "--quiet"]) == 0

    def standard() -> Any:
        data = json.loads((runs / "comparison.json").read_text())
        return next(q for q in data["quality"]["methods"] if (q["method"], q["coef"]) == ("standard", 0.3))

    assert standard()["parts"]["optimizer"]["state"] == "holds"
    assert standard()["verdict"] == "inconclusive"
    assert main(["compare", str(runs), "--quiet"]) == 0
    assert standard()["verdict"] == "rejected"
    # The comparison holds the endpoints by seed, so a report judges them at other limits.
    assert main(["report", str(runs / "comparison.json"), *loose, "--out", str(tmp_path / "page"), "--quiet"]) == 0
    assert "rejected</td>" not in (tmp_path / "page" / "report.html").read_text()


def test_the_pages_have_the_numbers_of_the_json_file(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs), "--verbose"]) == 0
    data, page = json.loads((runs / "comparison.json").read_text()), (runs / "comparison.md").read_text()
    for method in data["methods"]:
        assert number(method["metrics"]["ppl"]["mean"]) in page
    for record in data["quality"]["methods"]:
        assert record["verdict"] in page
        assert all(part["reason"].replace("|", "\\|") in page for part in record["parts"].values())
        assert number(record["delta_ppl"]) in page
    assert data["provenance"]["runs"] == sum(len(method["seeds"]) for method in data["methods"])
    assert str(runs) not in page
    # A short run shows the maximum and no p99.
    out = capsys.readouterr().out
    assert data["steps"] < 100
    assert "max ‖g‖" in out
    assert "p99 ‖g‖" not in out + page
    # A report of the comparison is the same page.
    assert main(["report", str(runs / "comparison.json"), "--out", str(tmp_path / "page"), "--quiet"]) == 0
    assert (tmp_path / "page" / "report.html").read_text() == (runs / "report.html").read_text()
    stages = json.loads((tmp_path / "page" / "decisions.json").read_text())["maps"][0]["decisions"]
    assert sum(stage["fired"] is not None for stage in stages) >= 2


def test_runs_without_per_block_validation_say_so(copy: Path) -> None:
    for file in copy.glob("*/metrics.json"):
        data = json.loads(file.read_text())
        del data["validation_blocks"]
        file.write_text(json.dumps(data))
    assert main(["compare", str(copy), "--quiet"]) == 0
    verdicts = json.loads((copy / "comparison.json").read_text())["quality"]["methods"]
    calm = next(q for q in verdicts if q["method"] == "centered" and q["coef"] == 1e-4)
    assert calm["verdict"] == "inconclusive"
    assert all("run them again" in calm["parts"][name]["reason"] for name in ("quality", "coordinate"))


def test_unmatched_pairs_are_refused_by_field(copy: Path, refused: Refused) -> None:
    file, first = (copy / f"standard-0.3-s{seed}" / "config.json" for seed in (2, 1))
    config, same_arm = json.loads(file.read_text()), json.loads(first.read_text())

    def refused_with(changes: dict[str, Any], named: str) -> None:
        file.write_text(json.dumps(config | changes))
        refused(["compare", copy, "--quiet"], named)

    # A method may have another target than the baseline, but all its seeds must have the same one.
    refused_with({"target": 0.0}, "differ in target (None → 0.0)")
    refused_with({"coef_until": 2}, "coef_until (None → 2)")
    for one, data in ((file, config), (first, same_arm)):
        one.write_text(json.dumps({**data, "target": 0.0, "gain_beta": 0.5}))
    assert main(["compare", str(copy), "--quiet"]) == 0
    first.write_text(json.dumps(same_arm))
    refused_with({"lr": 2e-3}, "lr (0.001 → 0.002)")
    other_text = {**config["data"]["train"], "fingerprint": "x"}
    refused_with({"data": config["data"] | {"train": other_text}}, "data.train.fingerprint")


def test_means_are_of_one_experiment_also_without_partners(copy: Path, refused: Refused) -> None:
    shutil.rmtree(copy / "ce-0-s2")
    assert main(["compare", str(copy), "--quiet"]) == 0
    data = json.loads((copy / "comparison.json").read_text())
    assert all(
        method["seeds"] == [1] for method in data["methods"]
    )  # seed 2 has no baseline: it stays out of the means
    file = copy / "standard-0.3-s2" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lr": 2e-3}))
    refused(["compare", copy, "--quiet"], "lr (0.001 → 0.002)")
    file.write_text(json.dumps(config))
    shutil.copytree(copy / "standard-0.3-s1", copy / "standard-copied")
    refused(["compare", copy, "--quiet"], "the same run")


@pytest.mark.parametrize(
    ("file", "content"), [("metrics.json", "{}"), ("steps.jsonl", "{"), ("steps.jsonl", None), ("config.json", "[]")]
)
def test_damaged_runs_are_named(copy: Path, refused: Refused, file: str, content: str | None) -> None:
    damaged = copy / "standard-0.3-s1" / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_text(content)
    refused(["compare", copy, "--quiet"], file)


def change(file: Path, path: str, value: Any) -> None:
    """Set the key at a dotted path of a JSON file."""
    data = json.loads(file.read_text())
    *holders, last = path.split(".")
    holder = data
    for part in holders:
        holder = holder[int(part) if isinstance(holder, list) else part]
    holder[int(last) if isinstance(holder, list) else last] = value
    file.write_text(json.dumps(data))


METRICS = [
    ("ppl", 0.5, "`ppl` is expected to be at least 1, but is 0.5"),
    ("ppl", 1.5, "`ppl` is expected to be exp(`ce`) with `ce` = "),
    ("ce", None, "`ppl` is expected to be exp(`ce`) with `ce` = None"),
    ("clip_rate", 1.5, "`clip_rate` is expected to be from 0 to 1, but is 1.5"),
    ("phi_10", 2.0, "phi_10` is expected to be from 0 to 1, but is 2.0"),
    ("c_aux", -1.2, "`c_aux` is expected to be from -1 to 1, but is -1.2"),
    ("heads.centered.e_16", 1.1, "`heads.centered.e_16` is expected to be from 0 to 1, but is 1.1"),
    ("gradient.raw.c_z", 1.5, "`gradient.raw.c_z` is expected to be from -1 to 1, but is 1.5"),
    ("validation_blocks.ce.2", -0.5, "`validation_blocks.ce.2` is expected to be at least 0, but is -0.5"),
    ("validation_blocks.ce.2", 0.5, "the mean of `validation_blocks.ce` over tokens, but is "),
    ("valid_predictions", 7, "the sum of `validation_blocks.tokens`, but is 7"),
    ("valid_nonfinite.nan", 10**6, "`valid_nonfinite` is expected to count at most"),
    ("p_z_999", 0.25, "as `heads.raw.p_z_999` is, but is 0.25"),
    ("reuse", 0.001, "`tokens_consumed` over `tokens_available`, but is 0.001"),
    ("grad_norm_p99", 1e9, "`grad_norm_p99` is expected to be at most `grad_norm_p999`, which is "),
    ("skipped_updates", 16, "`skipped_updates` is expected to be at most `steps`, which is 15, but is 16"),
    ("adam_v_max", 0.0, "`adam_v_p99` is expected to be at most `adam_v_max`, which is 0.0"),
    ("method", "ce", "as `method` of config.json is, but is 'ce'"),
    ("coef", 0.1, "is expected to be 0.3, as `coef` of config.json is, but is 0.1"),
    ("seed", 7, "is expected to be 1, as `seed` of config.json is, but is 7"),
]
STEPS = [
    ("grad_norm", -1.0, "`grad_norm` is expected to be at least 0, but is -1.0"),
    ("cross_entropy", -3.0, "`cross_entropy` is expected to be at least 0, but is -3.0"),
    ("adam.v_inf", -1.0, "`adam.v_inf` is expected to be at least 0, but is -1.0"),
    ("micro_nan", 5, "`micro_nan` + `micro_inf` is expected to be at most `micro_batches`, which is 1, but is 5"),
]
"""Of the fourth step."""
SETTINGS = [
    ("lr", -1.0, "`lr` is expected to be a finite number > 0, but got -1.0"),
    ("beta2", 1.5, "`beta2` is expected to be a number from 0 to below 1, but got 1.5"),
    ("coef", 0.5, "ce has no penalty, so its coefficient is 0, but got 0.5"),
]
IMPOSSIBLE = [("metrics.json", *row) for row in METRICS] + [("steps.jsonl", *row) for row in STEPS]
IMPOSSIBLE += [("config.json", *row) for row in SETTINGS]


@pytest.mark.parametrize(("name", "key", "value", "sentence"), IMPOSSIBLE)
def test_impossible_numbers_were_compared(
    runs: Path, tmp_path: Path, refused: Refused, name: str, key: str, value: Any, sentence: str
) -> None:
    source = "ce-0-s1" if name == "config.json" else "standard-0.3-s1"
    run = Path(shutil.copytree(runs / source, tmp_path / source))
    where = str(run / name)
    if name == "steps.jsonl":
        lines, where = (run / name).read_text().splitlines(), f"line 4 of {where}"
        (tmp_path / "line.json").write_text(lines[3])
        change(tmp_path / "line.json", key, value)
        lines[3] = (tmp_path / "line.json").read_text()
        (run / name).write_text("\n".join(lines) + "\n")
    else:
        change(run / name, key, value)
    refused(["compare", tmp_path, "--quiet"], where, sentence)
    assert not (tmp_path / "comparison.json").exists()


def test_a_ppl_that_contradicts_the_blocks_was_compared_and_rounding_is_no_contradiction(
    runs: Path, tmp_path: Path, refused: Refused
) -> None:
    """Both PPL and its CE were changed, so that they agree with each other."""
    shutil.copytree(runs / "ce-0-s1", tmp_path / "ce-0-s1")
    file = tmp_path / "ce-0-s1" / "metrics.json"
    data = json.loads(file.read_text())
    ce = data["ce"]
    change(file, "ce", ce - 1e-3)
    change(file, "ppl", math.exp(ce - 1e-3))
    mean = f"the mean of `validation_blocks.ce` over tokens, but is {ce - 1e-3!r}"
    refused(["compare", tmp_path, "--quiet"], f"{file} is not readable: `ce` is expected to be ", mean)
    for key in ("ppl", "ce", "reuse", "p_z_999"):
        change(file, key, float(f"{data[key]:.8g}"))
    change(file, "validation_blocks.ce", [float(f"{ce:.8g}") for ce in data["validation_blocks"]["ce"]])
    change(file, "gradient.raw.c_z", 1 + 1e-6)
    assert main(["compare", str(tmp_path), "--quiet"]) == 0


@pytest.mark.parametrize("name", ["standard-0.3-s1", "ce-0-s9", "ce-1e-05-s1", "active_route_sum-matched-0.1-s1"])
def test_a_folder_with_the_name_of_another_run_was_compared(
    runs: Path, tmp_path: Path, refused: Refused, name: str
) -> None:
    shutil.copytree(runs / "ce-0-s1", tmp_path / name)
    first = f"{tmp_path / name} is named for a different run than its config.json describes"
    second = "(`method` 'ce', `coef` 0.0, `seed` 1): its name is expected to be ce-0-s1"
    refused(["compare", tmp_path, "--quiet"], first, second)
    (tmp_path / name).rename(tmp_path / "my baseline-s1")  # a name that claims nothing
    assert main(["compare", str(tmp_path), "--quiet"]) == 0


def test_copies_of_one_run_were_compared_as_two_seeds(runs: Path, tmp_path: Path, refused: Refused) -> None:
    for name in ("ce-0", "standard-0.3"):
        for seed in (1, 2):
            shutil.copytree(runs / f"{name}-s1", tmp_path / f"{name}-s{seed}")
            for file in ("config.json", "metrics.json"):
                change(tmp_path / f"{name}-s{seed}" / file, "seed", seed)
    one, two = (tmp_path / f"ce-0-s{seed}" / "steps.jsonl" for seed in (1, 2))
    refused(
        ["compare", tmp_path, "--quiet"], f"{one} and {two} hold the same", "at all 15 steps, but `seed` is 1 and 2"
    )
    for name in ("ce-0-s2", "standard-0.3-s2"):
        shutil.rmtree(tmp_path / name)
        shutil.copytree(runs / name, tmp_path / name)
    assert main(["compare", str(tmp_path), "--quiet"]) == 0


def test_runs_in_which_the_seed_cannot_matter_say_so(tmp_path: Path) -> None:
    """Every step trains a pretrained model without dropout on the only block there is."""
    config = tiny_config(tmp_path, "neox", blocks=1, micro_batch=1, accumulate=1, steps=3, warmup=1, gradient_blocks=0)
    run_grid(
        Grid(config, ("ce", "standard"), (1e-2,), (1, 2)), tmp_path / "runs", options=RunOptions(checkpoint_every=0)
    )
    one, two = ((tmp_path / "runs" / f"ce-0-s{seed}" / "steps.jsonl").read_text().splitlines() for seed in (1, 2))
    assert [json.loads(line)["loss"] for line in one] == [json.loads(line)["loss"] for line in two]
    assert main(["compare", str(tmp_path / "runs"), "--quiet"]) == 0
    comparison = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    assert comparison["quality"]["seed_varies"].startswith("dropout alone")


def test_missing_parts_are_named(copy: Path, tmp_path: Path, refused: Refused) -> None:
    (copy / "centered-0.3-s2" / "metrics.json").unlink()
    shutil.rmtree(copy / "ce-0-s1")
    assert main(["compare", str(copy)]) == 0
    data = json.loads((copy / "comparison.json").read_text())
    assert data["unfinished"] == ["centered-0.3-s2"]
    assert "standard-0.3-s1" in data["unpaired"]
    lonely = next(q for q in data["quality"]["methods"] if (q["method"], q["coef"]) == ("centered", 0.3))
    assert lonely["accepted"] is None
    for words, sentence in (
        ([copy, "--baseline", "factorized"], "no run uses the baseline"),
        ([copy, "--baseline", "standard"], "name one of standard:0.0001, standard:0.3"),
        ([tmp_path / "nowhere"], "does not exist"),
        ([copy / "standard-0.3-s1"], "is one run: pass the folder that contains it"),
        ([copy, "--tolerance-ppl", "nan"], "--tolerance-ppl"),
        ([copy, "--diagnosed", "nonsense"], "unknown diagnosed quantity"),
    ):
        refused(["compare", *words], sentence)
    assert main(["compare", str(copy), "--baseline", "standard:0.3", "--quiet"]) == 0


def test_the_papers_update_outliers_are_rejected_for_their_tails(runs: Path, tmp_path: Path) -> None:
    tables = Path(zloss_paper.__file__).parent / "data" / "tables.json"
    table = json.loads(tables.read_text(encoding="utf-8"))["tab:fineweb_update_outlier"]
    rows, count = {row.pop("method"): row for row in table["rows"]}, table["config"]["steps"]
    absent = ("grad_inf_p99", "grad_inf_max", "adam_v_max", "adam_v_p99", "grad_norm_p999", "validation_blocks")
    for name, row in (("ce-0", rows["CE baseline"]), ("standard-0.3", rows["Standard Z-loss"])):
        for seed in (1, 2):
            place = Path(shutil.copytree(runs / f"{name}-s{seed}", tmp_path / f"{name}-s{seed}"))
            data = metrics(runs, place.name) | row | dict.fromkeys(absent)
            data |= {"steps": count, "ce": math.log(row["ppl"]), "spike_rate": 0.0}
            data["heads"]["raw"] |= {key: row[key] for key in ("p_z_999", "a_p_99")}
            (place / "metrics.json").write_text(json.dumps(data))
            change(place / "config.json", "steps", count)
            steps = [json.loads(line) for line in (place / "steps.jsonl").read_text().splitlines()]
            lines = (json.dumps({**steps[i % len(steps)], "step": i + 1}) for i in range(count))
            (place / "steps.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["compare", str(tmp_path), "--quiet"]) == 0
    (verdict,) = json.loads((tmp_path / "comparison.json").read_text())["quality"]["methods"]
    assert verdict["delta_ppl"] < 0  # a better PPL does not excuse the tails
    assert verdict["verdict"] == "rejected"
    assert verdict["reasons"] == [
        "optimizer: p99 ‖g‖₂ × 5.26 (limit × 2); max ‖g‖₂ × 22.2 (limit × 3); Φ_10 0 → 0.0172 (limit +0.01)."
    ]
