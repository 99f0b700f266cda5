"""Numbers over several processes: those of all tokens in one process, each counted once, in one collective."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import zloss
from tests.forked import forked_ranks
from zloss.telemetry.window import StepWindow, TokenTotals, _pack, micro_batch

OBJECTIVE = zloss.StandardZLoss(1e-2)


def loss(seed: int, tokens: int) -> zloss.HeadLossOutput:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(30, (tokens,), generator=g)
    target[::5] = -100
    weight = torch.randn(30, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64) + 0.3
    return zloss.head_loss(torch.randn(tokens, 6, generator=g, dtype=torch.float64), weight, target, OBJECTIVE)


def window_of(seeds: dict[int, int], *, across: bool = False) -> StepWindow:
    """A window of one step, with a micro-batch per seed → tokens."""
    window = StepWindow(4, "raw", across_ranks=across)
    for seed, tokens in seeds.items():
        window.add(micro_batch(loss(seed, tokens)))
    window.end_step(2.0, 1.0)
    return window


class TwoRanks:
    """The collective as two ranks would have it: this one's message, and that of a window on the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: StepWindow, other: list[TokenTotals]) -> None:
        self.calls, self._window, self._other = 0, window, other
        monkeypatch.setattr("zloss.telemetry.window.world_size", lambda: 2)
        monkeypatch.setattr("zloss.telemetry.window.gathered", self.gather)

    def gather(self, packed: torch.Tensor, _group: object) -> torch.Tensor:
        self.calls += 1
        return torch.stack([packed, torch.cat([_pack(part, self._window._kept) for part in self._other])])


def totals(window: StepWindow) -> TokenTotals:
    (step,) = window._steps
    return step.totals


def test_two_ranks_give_the_numbers_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = window_of({1: 300, 2: 170}).both()
    mine, other = window_of({1: 300}, across=True), totals(window_of({2: 170}))
    ranks = TwoRanks(monkeypatch, mine, [other, other])
    got = mine.both()
    assert ranks.calls == 1
    for one, two in zip(got, wanted, strict=True):
        assert one.keys() == two.keys()
        for name, value in two.items():
            assert one[name] == pytest.approx(value, rel=1e-9), name


def test_a_quantile_that_is_not_determined_is_left_out_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = window_of({1: 4000, 2: 4000}).last_step()
    mine, other = window_of({1: 4000}, across=True), totals(window_of({2: 4000}))
    mine._kept = 16
    TwoRanks(monkeypatch, mine, [other])
    first = mine.last_step()
    assert "gain_p99" not in first
    assert first["gain_max"] == pytest.approx(wanted["gain_max"])
    assert first["gain_mean"] == pytest.approx(wanted["gain_mean"])
    again = mine.last_step()
    assert again["gain_p99"] == pytest.approx(wanted["gain_p99"], rel=1e-9)
    assert again["p_z_999_raw"] == pytest.approx(wanted["p_z_999_raw"], rel=1e-9)


def test_a_rank_without_tokens_and_one_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = window_of({1: 100}, across=True), totals(window_of({2: 1}))  # its only token is ignored
    TwoRanks(monkeypatch, mine, [other])
    wanted = window_of({1: 100}).last_step()
    assert mine.last_step() == pytest.approx(wanted)
    broken = totals(window_of({2: 60}))
    broken.values["gain"][3] = float("nan")  # a valid token
    TwoRanks(monkeypatch, mine, [broken])
    finite = {name for name, value in mine.last_step().items() if value == value}
    assert not {"gain_max", "gain_mean"} & finite
    assert "log_z_mean" in finite


def print_scalars_of_both() -> None:
    """What a rank of two processes does."""
    dist.init_process_group("gloo")
    seeds = {1: 300} if dist.get_rank() == 0 else {2: 170}
    found = window_of(seeds, across=True).scalars()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes() -> None:
    got = json.loads(forked_ranks(2, print_scalars_of_both))
    assert got == pytest.approx(window_of({1: 300, 2: 170}).scalars(), rel=1e-9)
