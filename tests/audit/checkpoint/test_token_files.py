"""tokens.parquet of an audit: its columns give the numbers of the report, and the parts of a pass survive any interruption."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from tests.audit.checkpoint.test_run import CONFIG, InterruptAfter
from tests.faults.child import Child, run
from tests.faults.write_events import kill_at_write
from zloss.audit.checkpoint import token_files
from zloss.audit.checkpoint.run import run_audit
from zloss.audit.checkpoint.token_files import ParquetColumns, TokenParts, write_parquet
from zloss.audit.config import AuditConfig
from zloss.errors import InputError, MissingDependencyError, UnwritableFolderError
from zloss.measure import tokens
from zloss.measure.tokens import FLOATS, INTEGERS, TokenSample
from zloss.results.audit import AuditReport

BLOCKS, SIZE = CONFIG.blocks or 0, CONFIG.block_size or 0


@pytest.fixture(scope="module")
def config(folders: dict[str, Path], text: Path) -> AuditConfig:
    return dataclasses.replace(CONFIG, model=str(folders["gpt2"]), texts=(str(text),))


@pytest.fixture(scope="module")
def whole(config: AuditConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditReport, Path]:
    """(the report of an undisturbed audit, its folder)."""
    folder = tmp_path_factory.mktemp("whole")
    return run_audit(config, folder=folder), folder


def columns_in(folder: Path) -> dict[str, Any]:
    table = parquet.read_table(folder / "tokens.parquet")
    return {name: table[name].to_numpy() for name in table.column_names}


def same_table(a: Path, b: Path) -> bool:
    mine, theirs = columns_in(a), columns_in(b)
    return mine.keys() == theirs.keys() and all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)


@pytest.mark.parametrize(("name", "value"), [("FLOATS", (*FLOATS, "another_column")), ("__version__", "0.0")])
def test_parts_with_other_columns_or_of_another_version_are_refused(
    config: AuditConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    """They used to be joined: a new column was null in every row, even in those measured after the resume."""
    assert run_audit(config, folder=tmp_path, progress=InterruptAfter(9)).status == "partial"
    monkeypatch.setattr(token_files, name, value)
    with pytest.raises(InputError, match="or another version of zloss wrote it"):
        run_audit(config, folder=tmp_path, resume=True)


def test_the_page_lists_every_column() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tokens.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [name.strip(" `") for row in rows for name in row.split(",")] == [*INTEGERS, *FLOATS]
    size = f"{4 * len((*INTEGERS, *FLOATS))} bytes"
    assert size in page, f"docs/tokens.md: a token now takes {size}"


def test_the_numbers_of_the_report_are_numpys_over_the_columns(whole: tuple[AuditReport, Path]) -> None:
    report, folder = whole
    found = columns_in(folder)
    assert list(found) == [*INTEGERS, *FLOATS]
    assert len(found["ce"]) == report.corpus.predictions == BLOCKS * SIZE
    c, beta, coef = report.target or math.nan, report.gain_beta, report.diag_coef
    for head, suffix in ((report.heads.raw, ""), (report.heads.centered, "_centered")):
        of = {
            name: found[f"{name}{suffix}"].astype(np.float64) for name in ("log_z", "gain", "mu", "delta_u", "row_max")
        }
        gain, violation = of["gain"], np.abs(of["log_z"] - c)
        rank16 = found[f"rank16{suffix}"].astype(np.float64)
        assert head.a_p_99 == np.quantile(gain, 0.99)
        assert head.delta_u_99 == np.quantile(of["delta_u"], 0.99)
        assert head.row_max_999 == np.quantile(of["row_max"], 0.999)
        assert head.mu_abs_99 == np.quantile(np.abs(of["mu"]), 0.99)
        expected = {
            "p_z_999": np.quantile(violation, 0.999),
            "diag_z": coef * np.mean(violation**2),
            "a_p_mean": gain.mean(),
            "log_z_mean": of["log_z"].mean(),
            "mu_rms": math.sqrt(np.mean(of["mu"] ** 2)),
            "delta_u_99_gain_aware": np.quantile(of["delta_u"] / (1 + beta * gain**2), 0.99),
            "f_16": np.mean(rank16 / gain**2),
            "rho_16": np.corrcoef(rank16, gain**2)[0, 1],
        }
        for name, want in expected.items():
            assert getattr(head, name) == pytest.approx(float(want), rel=1e-6), name
    assert report.ppl == pytest.approx(math.exp(found["ce"].mean(dtype=np.float64)), rel=1e-12)
    # In the precision of the column numpy interpolates with less than that.
    assert report.heads.raw.a_p_99 == pytest.approx(float(np.quantile(found["gain"], 0.99)), rel=1e-6)


def test_the_extreme_tokens_are_rows_of_the_table_and_the_metadata_is_what_columns_depend_on(
    config: AuditConfig, whole: tuple[AuditReport, Path]
) -> None:
    report, folder = whole
    found = columns_in(folder)
    for extreme in report.extreme_tokens[0].tokens:
        row = extreme.block * SIZE + extreme.position
        assert (found["block"][row], found["position"][row]) == (extreme.block, extreme.position)
        for name in ("log_z", "log_z_centered", "mu", "gain", "gain_centered", "ce"):
            assert getattr(extreme, name) == found[name][row]
    assert np.array_equal(found["target"][:-1], found["token"][1:])  # blocks are one stream
    facts = parquet.read_schema(folder / "tokens.parquet").metadata
    assert facts[b"schema"] == b"zloss.tokens/1"
    assert (float(facts[b"target"]), float(facts[b"diag_coef"])) == (report.target, report.diag_coef)
    again = run_audit(config)  # in memory, without a table
    assert again == dataclasses.replace(report, timings=again.timings, provenance=again.provenance)


def test_a_head_without_mu_has_null_columns(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, model=str(folders["gemma2"]), texts=(str(text),), gradient_blocks=0)
    report = run_audit(config, folder=tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "tokens.parquet")
    assert table.column_names == [*INTEGERS, *FLOATS]
    assert table["mu"].null_count == table["gain_centered"].null_count == table.num_rows == BLOCKS * SIZE
    assert table["gain"].null_count == 0
    assert report == dataclasses.replace(run_audit(config), timings=report.timings, provenance=report.provenance)


def part(start: int, stop: int, size: int = 1000) -> dict[str, Any]:
    block = np.repeat(np.arange(start, stop, dtype=np.int32), size)
    position = np.tile(np.arange(size, dtype=np.int32), stop - start)
    ce = np.sin(block * size + position).astype(np.float32)
    return {"block": block, "position": position, "token": position, "target": position, "ce": ce}


def token_parts(folder: Path, limit: int = 10) -> TokenParts:
    return TokenParts(folder, "pass", lambda: "model", TokenSample(3, seed=0, limit=limit))


def test_row_groups_are_large(tmp_path: Path) -> None:
    file = tmp_path / "below" / "tokens.parquet"
    spans = [(start, start + 30) for start in range(0, 300, 30)]
    found = write_parquet(file, (part(*span) for span in spans), {})
    groups = [
        parquet.ParquetFile(file).metadata.row_group(g).num_rows
        for g in range(parquet.ParquetFile(file).num_row_groups)
    ]
    assert sum(groups) == 300_000
    assert all(rows >= 1 << 16 for rows in groups[:-1])
    assert len(groups) == 2
    assert list(found) == ["block", "position", "token", "target", "ce"]
    assert np.array_equal(found["ce"], part(0, 300)["ce"])
    assert found.get("mu") is None
    found.move(tmp_path / "tokens.parquet")
    assert np.array_equal(found["block"], part(0, 300)["block"])


def test_a_column_of_a_long_table_is_read_alone(tmp_path: Path) -> None:
    """Memory beyond the model: one column and what numpy needs to partition it, not the table."""
    script = (
        "import sys, resource, numpy as np\n"
        "from pathlib import Path\n"
        "from pyarrow import parquet\n"
        "from zloss.audit.checkpoint.token_files import ParquetColumns\n"
        "from zloss.measure.tokens import quantile, mean, bars, finite\n"
        "columns = ParquetColumns(Path(sys.argv[1]), ('ce', 'gain', 'log_z', 'delta_u'))\n"
        "parquet.read_schema(sys.argv[1])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in columns:\n"
        "    quantile(columns[name], 0.999), mean(columns[name]), bars(finite(columns[name]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    rng = np.random.default_rng(0)

    def parts() -> Any:
        for start in range(0, 3_000_000, 100_000):
            ids = np.arange(start, start + 100_000, dtype=np.int32)
            floats = {name: rng.random(100_000, dtype=np.float32) for name in ("ce", "gain", "log_z", "delta_u")}
            yield dict.fromkeys(INTEGERS, ids) | floats

    write_parquet(tmp_path / "tokens.parquet", parts(), {})
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "tokens.parquet")], capture_output=True, text=True, check=True
    )
    # A column is 12 MB in fp32; quantiles and histograms widen it to fp64.
    assert int(done.stdout) / 1024 < 110


def test_parts_come_back_in_order_and_with_their_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLOSS_SAVE_EVERY", "0")

    def take(sample: TokenSample, start: int, stop: int) -> TokenSample:
        index = np.arange(start * 10, stop * 10)
        sample.add(index, np.repeat(index[:, None], 3, axis=1).astype(np.float32))
        return sample

    first, again = (token_parts(tmp_path, limit=40) for _ in range(2))
    for start, stop in ((0, 4), (4, 8), (8, 9)):
        take(first.sample, start, stop)
        first.add(start, stop, part(start, stop, 10))
    assert again.resume(0) == 9
    blocks = np.concatenate([again[place]["block"] for place in range(len(again))])
    assert np.array_equal(blocks, part(0, 9, 10)["block"])
    want = take(TokenSample(3, seed=0, limit=40), 0, 9)
    assert np.array_equal(again.sample.index_S, want.index_S)
    assert np.array_equal(again.sample.vectors_SD, want.vectors_SD)
    # Behind a part that is missing nothing counts.
    (tmp_path / "audit-parts" / "part-000000004-000000008.npz").unlink()
    assert token_parts(tmp_path).resume(0) == 4
    again.clear()
    assert not (tmp_path / "audit-parts").exists()
    monkeypatch.setenv("ZLOSS_SAVE_EVERY", "soon")
    with pytest.raises(InputError, match="ZLOSS_SAVE_EVERY is expected to be a number of seconds, but is 'soon'"):
        token_parts(tmp_path)


def test_a_part_is_written_after_enough_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZLOSS_SAVE_EVERY", "1000")
    monkeypatch.setattr(token_files, "PART_ROWS", 50)
    parts = token_parts(tmp_path)
    for start in range(9):
        parts.add(start, start + 1, part(start, start + 1, 10))
    assert sorted(path.name for path in (tmp_path / "audit-parts").iterdir()) == ["part-000000000-000000005.npz"]
    assert len(parts) == 5  # a part and four batches that are not written yet


def test_an_interrupted_audit_has_the_report_and_table_of_what_it_finished_and_resumes(
    config: AuditConfig, whole: tuple[AuditReport, Path], tmp_path: Path
) -> None:
    partial = run_audit(config, folder=tmp_path, progress=InterruptAfter(9))
    assert (partial.status, partial.finished_blocks) == ("partial", 12)  # a batch is counted whole or not at all
    assert partial.gradient is None
    reasons = partial.to_dict()["reasons"]
    assert "interrupted" in reasons["gradient"]
    assert "interrupted" in reasons["router"]
    found, everything = columns_in(tmp_path), columns_in(whole[1])
    assert len(found["ce"]) == partial.corpus.predictions == 12 * SIZE
    assert all(np.array_equal(found[name], everything[name][: 12 * SIZE]) for name in found)
    assert list((tmp_path / "audit-parts").glob("part-*.npz"))
    resumed = run_audit(config, folder=tmp_path, resume=True)
    assert same_table(tmp_path, whole[1])
    # The gradients too: the forward passes that the first part made are made again.
    assert resumed == dataclasses.replace(whole[0], timings=resumed.timings, provenance=resumed.provenance)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.parquet"]


def test_an_audit_that_begins_anew_forgets_earlier_parts(
    config: AuditConfig, whole: tuple[AuditReport, Path], tmp_path: Path
) -> None:
    run_audit(dataclasses.replace(config, diag_coef=1e-2), folder=tmp_path, progress=InterruptAfter(9))
    run_audit(config, folder=tmp_path)
    assert same_table(tmp_path, whole[1])
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.parquet"]


def test_an_interrupted_gradient_section_does_not_cost_the_pass(
    config: AuditConfig, whole: tuple[AuditReport, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts used to be deleted before the gradients: a resumed audit read the whole text again."""
    from zloss.audit.checkpoint import run

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setenv("ZLOSS_SAVE_EVERY", "0")
    with monkeypatch.context() as patch:
        patch.setattr(run, "diagnostic_gradients", interrupted)
        assert run_audit(config, folder=tmp_path).status == "partial"
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "token_chunks", interrupted)
        resumed = run_audit(config, folder=tmp_path, resume=True)
    assert resumed.heads == whole[0].heads
    assert resumed.figures == whole[0].figures
    assert resumed.gradient == whole[0].gradient


def audit_words(model: Path, text: Path, out: Path) -> list[str]:
    options = "--blocks 21 --block-size 48 --batch-blocks 1 --gradient-blocks 2 --no-figures --quiet --resume"
    return ["audit", str(model), "--text", str(text), *options.split(), "--out", str(out)]


def test_an_audit_that_is_killed_again_and_again_ends_as_if_it_was_not(
    folders: dict[str, Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZLOSS_SAVE_EVERY", "0")
    model = folders["gpt2"]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run(audit_words(model, text, alone)).code == 0
    rng, kills = random.Random(0), 0
    for _ in range(5):
        place = kill_at_write(killed / "audit-parts", rng.randrange(2, 12))
        kills += Child(audit_words(model, text, killed), place).wait().killed
    assert kills == 5
    ended = run(audit_words(model, text, killed))
    assert ended.code == 0, ended.error
    assert same_table(alone, killed)
    reports = [json.loads((folder / "report.json").read_text()) for folder in (alone, killed)]
    for report in reports:
        del report["timings"], report["provenance"]
    assert reports[0] == reports[1]
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in alone.iterdir())


def test_a_missing_pyarrow_is_named_before_the_pass(
    config: AuditConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = token_files.importlib.util.find_spec
    monkeypatch.setattr(
        token_files.importlib.util, "find_spec", lambda name: None if name == "pyarrow" else found(name)
    )
    with pytest.raises(MissingDependencyError, match=r"pyarrow.*zloss\[audit\]"):
        run_audit(config, folder=tmp_path)
    assert run_audit(config).status == "complete"  # without a folder it is not needed


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwritableFolderError, match="cannot write"):
        write_parquet(tmp_path / "file" / "tokens.parquet", iter([part(0, 1)]), {})
    found = write_parquet(tmp_path / "tokens.parquet", iter([part(0, 1)]), {})
    with pytest.raises(UnwritableFolderError, match="cannot write"):
        found.move(tmp_path / "nowhere" / "tokens.parquet")
    assert isinstance(found, ParquetColumns)


def test_only_the_audit_of_a_checkpoint_loads_pyarrow() -> None:
    """Validation of runs, routers and implementation audits use the same functions on arrays in memory."""
    modules = "zloss.measure.tokens, zloss.measure.gradients, zloss.train.metrics, zloss.train.moe"
    modules += ", zloss.audit.router, zloss.audit.implementation.run, zloss.audit.checkpoint.run"
    code = f"import sys, {modules}; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
