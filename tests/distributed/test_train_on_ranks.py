"""`zloss train` under torchrun and `accelerate launch`: the run of one process, and what a killed rank leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.commands import DROPOUT, MOE, SCRATCH, differing, entries, train_argv
from tests.distributed.conftest import KilledJob, OnRanks
from tests.train.tiny_run import tiny_config
from zloss.cli.main import main
from zloss.jobs import Job
from zloss.train.data import micro_batches
from zloss.train.folder import read_steps
from zloss.train.start import prepare_start

pytestmark = pytest.mark.timeout(900)  # the launches that these tests share count for the first of them


def outcome(folder: Path) -> dict[str, Any]:
    """Every entry of the files of a run, without the time a step took."""
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return entries({"metrics": json.loads((folder / "metrics.json").read_text()), "steps": steps}, without=("seconds",))


@pytest.mark.parametrize(
    ("case", "options", "folder", "runs", "passes"),
    [
        ("whole run", DROPOUT, "whole", ["centered-0.001-s1"], None),
        ("blocks", SCRATCH, "blocks", ["ce-0-s1", "standard-0.01-s1"], 2),
        ("experts", MOE, "experts", ["active_route_sum-0.05-s1"], None),
    ],
    ids=["micro-batches divided", "blocks divided", "experts"],
)
def test_two_ranks_train_as_one_process(
    case: str, options: list[str], folder: str, runs: list[str], passes: int | None, root: Path, on_ranks: OnRanks
) -> None:
    assert on_ranks.codes[case] == [0, 0], on_ranks.stderr[case]
    assert main(train_argv(root, *options, out=f"alone-{folder}", model=case == "whole run")) == 0
    for run in runs:
        want, got = outcome(root / f"alone-{folder}" / run), outcome(root / folder / run)
        if passes is not None:  # a micro-batch that lies on two ranks is two passes
            for name in [name for name in want if name.endswith(".micro_batches")]:
                assert (want.pop(name), got.pop(name)) == (1, passes)
        assert len(want) > 500
        assert differing(got, want, 2e-5) == {}
        assert (root / folder / run / "config.json").read_text() == (
            root / f"alone-{folder}" / run / "config.json"
        ).read_text()


def test_a_killed_rank_ends_the_job_with_a_sentence(killed_run: KilledJob) -> None:
    assert killed_run.code != 0
    assert killed_run.seconds < 60
    assert "zloss train: rank 0 of 2" in killed_run.stderr
    assert "the same command resumes from there" in killed_run.stderr
    assert "Traceback" not in killed_run.stderr.partition("torch/distributed/elastic")[0]
    # The job survived the first kill: the launcher restarted both ranks, and they resumed from the last checkpoint.
    first, second = killed_run.seen
    assert 14 <= first < 36 <= second < 80


def test_a_killed_run_resumes_as_if_uninterrupted(root: Path, on_ranks: OnRanks) -> None:
    assert on_ranks.codes["killed run"] == [0, 0]
    resumed, whole = root / "killed" / "centered-0.001-s1", root / "whole" / "centered-0.001-s1"
    assert outcome(resumed) == outcome(whole)
    assert len(read_steps(resumed)) == 80
    assert not (resumed / "checkpoints").exists()


def test_one_rank_prints(root: Path, on_ranks: OnRanks) -> None:
    assert on_ranks.codes["finished run"] == [0, 0]
    assert on_ranks.stdout.count("centered-0.001-s1: finished before, skipped") == 1
    assert on_ranks.stdout.count("compare them with") == 1
    for case, reason in {
        "dropout refused": "dropout",
        "experts refused": "load-balancing",
        "few blocks": "give every process a block",
    }.items():
        assert on_ranks.codes[case] == [2, 2]
        assert on_ranks.stderr[case].count(reason) == 1
    assert "--accumulate" in on_ranks.stderr["dropout refused"]
    assert not list((root / "refused").rglob("steps.jsonl"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("micro_batch", "accumulate"), [(2, 5), (5, 1), (3, 2)])
def test_every_block_of_a_step_is_on_one_rank(ranks: int, micro_batch: int, accumulate: int, root: Path) -> None:
    config = replace(tiny_config(root / "in"), micro_batch=micro_batch, accumulate=accumulate)
    data = prepare_start(config).data
    whole = torch.cat([batch.inputs_BT for batch in micro_batches(config, data, 3)])
    shares = [list(micro_batches(config, data, 3, Job(rank, ranks))) for rank in range(ranks)]
    assert all(shares)
    assert torch.equal(torch.cat([batch.inputs_BT for share in shares for batch in share]), whole)
    if ranks <= accumulate:
        alone = [batch.seed for batch in micro_batches(config, data, 3)]
        assert [batch.seed for share in shares for batch in share] == alone
