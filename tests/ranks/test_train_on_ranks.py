"""`torchrun -m zloss train`: the run of one process, and what is left of a run whose rank was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launch import launched, rank_of, torchrun
from tests.train.tiny_run import tiny_config
from zloss.cli.main import main
from zloss.train.data.micro_batches import micro_batches
from zloss.train.folder.step_log import read_steps

COMMON = [
    *("--block-size", "24", "--valid-blocks", "6", "--adam-every", "4", "--gradient-blocks", "2"),
    *("--lr", "1e-3", "--checkpoint-every", "8", "--trackers", "none", "--quiet"),
]
DROPOUT = ["--steps", "120", "--micro-batch", "2", "--accumulate", "2", "--methods", "centered", "--coef", "1e-3"]
"""Micro-batches are divided; the model has dropout."""
SCRATCH = [
    *("--from-config", "tiny", "--train-tokenizer", "300", "--head", "paper", "--steps", "10", "--micro-batch", "3"),
    *("--methods", "ce,standard", "--coef", "1e-2"),
]
"""Three blocks of one micro-batch on two ranks."""
MOE = [
    *("--moe", "--top-k", "2", "--experts", "4", "--moe-layers", "2", "--moe-width", "32", "--expert-width", "16"),
    *("--train-tokenizer", "300", "--steps", "6", "--micro-batch", "2", "--accumulate", "3"),
    *("--router", "active_route_sum", "--router-coef", "0.05", "--capacity-factor", "1.0"),
]
"""Three micro-batches on two ranks."""
KILLED, WHOLE, BLOCKS, EXPERTS, AGAIN, REFUSED, MOE_REFUSED, FEW = range(8)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_config(folder / "in")
    return folder


def words(root: Path, *options: str, out: str, model: bool = False) -> list[str]:
    named = [str(root / "in" / "gpt2")] if model else []
    return ["train", *named, "--text", str(root / "in" / "text.txt"), *COMMON, *options, "--out", str(root / out)]


@pytest.fixture(scope="module")
def killed(root: Path) -> tuple[int, str, list[int], float]:
    """A job whose rank 1 is killed twice, and which may be started anew once: (exit code, what it said, steps that were
    written at each kill, seconds from the last kill to its end)."""
    run = [*torchrun(2, "--max-restarts=1"), "-m", "zloss", *words(root, *DROPOUT, out="killed", model=True)]
    steps, written, at = root / "killed" / "centered-0.001-s1" / "steps.jsonl", [], 0.0
    environment = {**os.environ, "ZLOSS_RANK_TIMEOUT": "60"}
    with subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        began = time.monotonic()
        for wanted in (20, 50):
            while job.poll() is None and time.monotonic() - began < 120:
                lines = steps.read_text().count("\n") if steps.exists() else 0
                if lines >= wanted:
                    break
                time.sleep(0.01)
            process = None if job.poll() is not None else rank_of(job.pid, 1)
            assert process is not None, f"the job was over before its rank could be killed: {job.communicate()}"
            os.kill(process, signal.SIGKILL)
            at = time.monotonic()
            written.append(lines)
        _, told = job.communicate(timeout=120)
    return job.returncode, told, written, time.monotonic() - at


@pytest.fixture(scope="module")
def on_ranks(root: Path, killed: object) -> tuple[list[list[int]], list[str]]:
    """One launch for all runs: exit codes of both ranks, and what was said, by command."""
    dropout = words(root, *DROPOUT, out="whole", model=True)
    single = [*DROPOUT[:4], "--accumulate", "1", "--methods", "ce"]
    commands = {
        KILLED: words(root, *DROPOUT, out="killed", model=True),
        WHOLE: dropout,
        BLOCKS: words(root, *SCRATCH, out="blocks"),
        EXPERTS: words(root, *MOE, out="experts"),
        AGAIN: [word for word in dropout if word != "--quiet"],
        REFUSED: words(root, *single, out="refused", model=True),
        MOE_REFUSED: words(root, *MOE, "--accumulate", "1", out="refused"),
        FEW: words(root, *SCRATCH, "--micro-batch", "1", out="refused"),
    }
    done = launched(2, "tests.ranks.train_cases", json.dumps([commands[case] for case in sorted(commands)]))
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads(done.stdout[done.stdout.index("[[") :])
    # Both ranks announce a command; what they say of it stands between that and the next one.
    said = [part.partition("\n")[2] for part in done.stderr.split("begin ")[1:]]
    return codes, [done.stdout, *("".join(said[2 * case : 2 * case + 2]) for case in sorted(commands))]


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Every entry of a file by its place, without the time a step took."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if key != "seconds"}
        return {name: n for key, inner in kept.items() for name, n in numbers(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {name: n for i, inner in enumerate(value) for name, n in numbers(inner, f"{path}[{i}]").items()}
    return {path: value}


def outcome(folder: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return numbers({"metrics": json.loads((folder / "metrics.json").read_text()), "steps": steps})


def differing(got: dict[str, Any], want: dict[str, Any], rel: float) -> dict[str, Any]:
    assert got.keys() == want.keys()
    far = {}
    for name, value in want.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Differences of losses and gradients of nearly equal size: their own rounding is that of the larger numbers.
        close = pytest.approx(value, rel=rel, abs=rel) if number else value
        if got[name] != close:
            far[name] = (got[name], value)
    return far


@pytest.mark.parametrize(
    ("case", "options", "folder", "runs", "passes"),
    [
        (WHOLE, DROPOUT, "whole", ["centered-0.001-s1"], None),
        (BLOCKS, SCRATCH, "blocks", ["ce-0-s1", "standard-0.01-s1"], 2),
        (EXPERTS, MOE, "experts", ["active_route_sum-0.05-s1"], None),
    ],
    ids=["micro-batches divided", "blocks divided", "experts"],
)
def test_two_ranks_train_as_one_process(
    case: int,
    options: list[str],
    folder: str,
    runs: list[str],
    passes: int | None,
    root: Path,
    on_ranks: tuple[list[list[int]], list[str]],
) -> None:
    assert on_ranks[0][case] == [0, 0], on_ranks[1][case + 1]
    assert main(words(root, *options, out=f"alone-{folder}", model=case == WHOLE)) == 0
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


def test_a_killed_rank_ends_the_job_with_a_sentence(
    root: Path, killed: tuple[int, str, list[int], float], on_ranks: tuple[list[list[int]], list[str]]
) -> None:
    code, told, written, seconds = killed
    assert code != 0
    assert seconds < 60
    assert "zloss train: rank 0 of 2" in told
    assert "the same command goes on with it" in told
    assert "Traceback" not in told.partition("torch/distributed/elastic")[0]
    # The first kill was survived: the launcher started both ranks anew, and they went on from the last checkpoint.
    assert 20 <= written[0] < 50 <= written[1] < 120


def test_a_killed_run_goes_on_as_if_uninterrupted(root: Path, on_ranks: tuple[list[list[int]], list[str]]) -> None:
    assert on_ranks[0][KILLED] == [0, 0]
    resumed, whole = root / "killed" / "centered-0.001-s1", root / "whole" / "centered-0.001-s1"
    assert outcome(resumed) == outcome(whole)
    assert len(read_steps(resumed)) == 120
    assert not (resumed / "checkpoints").exists()


def test_one_rank_speaks(root: Path, on_ranks: tuple[list[list[int]], list[str]]) -> None:
    codes, said = on_ranks
    assert codes[AGAIN] == [0, 0]
    assert said[0].count("centered-0.001-s1: finished before, skipped") == 1
    assert said[0].count("compare them with") == 1
    assert codes[REFUSED] == codes[MOE_REFUSED] == codes[FEW] == [2, 2]
    assert said[REFUSED + 1].count("dropout") == 1
    assert "--accumulate" in said[REFUSED + 1]
    assert said[MOE_REFUSED + 1].count("load-balancing") == 1
    assert said[FEW + 1].count("give every process a block") == 1
    assert not list((root / "refused").rglob("steps.jsonl"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("micro_batch", "accumulate"), [(2, 5), (5, 1), (3, 2)])
def test_every_block_of_a_step_is_on_one_rank(ranks: int, micro_batch: int, accumulate: int, root: Path) -> None:
    from dataclasses import replace

    import torch

    from zloss.ranks.job import Job
    from zloss.train.start.run_start import prepare_start

    config = replace(tiny_config(root / "in"), micro_batch=micro_batch, accumulate=accumulate)
    data = prepare_start(config).data
    whole = torch.cat([batch.inputs_BT for batch in micro_batches(config, data, 3)])
    shares = [list(micro_batches(config, data, 3, Job(rank, ranks))) for rank in range(ranks)]
    assert all(shares)
    assert torch.equal(torch.cat([batch.inputs_BT for share in shares for batch in share]), whole)
    if ranks <= accumulate:
        alone = [batch.seed for batch in micro_batches(config, data, 3)]
        assert [batch.seed for share in shares for batch in share] == alone
