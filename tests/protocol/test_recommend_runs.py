"""Finished runs read in other ways: Centered head from CE, and each half of the validation text; free memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.train.tiny_run import tiny_config
from zloss.errors import InputError
from zloss.protocol.recommend_runs import Half, as_centered_head, free_bytes, on_half
from zloss.train.compare import compare_runs
from zloss.train.finished import FinishedRun, read_run
from zloss.train.run import run_training
from zloss.train.start import prepare_start


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """CE and Centered head of one seed, trained separately."""
    folder = tmp_path_factory.mktemp("runs")
    config = tiny_config(folder, steps=4, warmup=1, valid_blocks=32)
    start = prepare_start(config)
    for method in ("ce", "centered-head"):
        run_training(replace(config, method=method), start, folder / method)
    return {method: read_run(folder / method) for method in ("ce", "centered-head")}


def test_centered_head_read_from_ce_is_the_run_of_centered_head(runs: dict[str, FinishedRun]) -> None:
    read = as_centered_head(runs["ce"])
    assert read.metrics == runs["centered-head"].metrics
    assert json.dumps(read.config, sort_keys=True) == json.dumps(runs["centered-head"].config, sort_keys=True)


def test_a_head_without_mu_or_of_the_papers_kind_has_no_reading(runs: dict[str, FinishedRun]) -> None:
    run = runs["ce"]
    capped = replace(run.record, heads=replace(run.record.heads, centered=type(run.record.heads.raw)()))
    assert as_centered_head(replace(run, record=capped)) is None
    assert as_centered_head(replace(run, config={**run.config, "head": "paper"})) is None


def test_the_halves_share_no_block_and_together_are_the_whole(runs: dict[str, FinishedRun]) -> None:
    whole = runs["ce"].record
    selecting, confirming = (on_half(runs["ce"], half).record for half in ("selection", "confirmation"))
    for one, parity in ((selecting, 0), (confirming, 1)):
        assert one.validation_blocks.ce == whole.validation_blocks.ce[parity::2]
        assert one.ppl == pytest.approx(
            math.exp(float(np.mean([ce for ce in one.validation_blocks.ce if ce is not None])))
        )
    assert (selecting.ce + confirming.ce) / 2 == pytest.approx(whole.ce, rel=1e-6)
    assert selecting.valid_predictions == whole.valid_predictions // 2


def test_every_number_of_the_head_is_of_the_half(runs: dict[str, FinishedRun]) -> None:
    one = on_half(runs["ce"], "selection").record.heads.raw
    whole = runs["ce"].record.heads.raw
    assert one.a_p_99 is None
    assert one.sigma_1 is None
    for key in ("p_z_999", "mu_abs_99", "delta_u_99", "diag_z", "mu_rms"):
        assert getattr(one, key) == pytest.approx(getattr(whole, key), rel=0.3), key
        assert getattr(one, key) != getattr(whole, key), key


def test_a_comparison_of_halves_judges_by_their_blocks_alone(runs: dict[str, FinishedRun]) -> None:
    """CE of the other half is changed without effect."""
    ce, head = runs["ce"], runs["centered-head"]
    blocks = head.record.validation_blocks
    spoiled = replace(blocks, ce=tuple(99.0 if i % 2 else value for i, value in enumerate(blocks.ce)))
    changes: dict[Half, float] = {"selection": 0.0, "confirmation": 90.0}
    for half, delta in changes.items():
        changed = replace(head, record=replace(head.record, validation_blocks=spoiled))
        found = compare_runs([on_half(ce, half), on_half(changed, half)])
        parts = found.quality.methods[0].parts
        assert parts.quality.numbers["delta_ce"] == pytest.approx(delta, abs=10)
        assert (parts.quality.numbers["delta_ce"] == 0) == (delta == 0)


def test_a_run_without_blocks_is_refused_by_its_name(runs: dict[str, FinishedRun], tmp_path: Path) -> None:
    run = replace(runs["ce"], folder=tmp_path / "old", record=replace(runs["ce"].record, validation_blocks=None))
    with pytest.raises(InputError, match="old has no per-block validation"):
        on_half(run, "selection")


def test_free_memory_is_what_the_kernel_and_the_control_group_leave(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert free_bytes(tmp_path) == 0
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_bytes(tmp_path) == 4096 * 1024
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000\n")
    for limit, free in (("3000\n", 2000), ("max\n", 4096 * 1024)):
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
        assert free_bytes(tmp_path) == free
