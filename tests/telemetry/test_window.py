"""Windows over steps: the numbers of all their tokens, bounded, independent of the split to micro-batches and processes."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

import zloss
from tests.forked import forked_ranks
from zloss.errors import InputError
from zloss.results.quantities import DEPLOYED, SCALARS
from zloss.statistics import LEVELS, MEANS, TAILS
from zloss.telemetry.alerts import GRADIENT_NORM, LOG_Z, RULES, VIOLATION
from zloss.telemetry.trackers import KNOWN, MAIN
from zloss.telemetry.window import StepWindow, TokenTotals, _pack, micro_batch

OBJECTIVE = zloss.CenteredZLoss(1e-2)


def tensors(seed: int, tokens: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(40, (tokens,), generator=g)
    target[::4] = -100
    weight = torch.randn(40, 8, generator=torch.Generator().manual_seed(99), dtype=torch.float64) + 0.2
    return torch.randn(tokens, 8, generator=g, dtype=torch.float64), weight, target


def loss(parts: list[int], reduction: str = "mean", cut: slice = slice(None)) -> zloss.HeadLossOutput:
    joined = [torch.cat(each) for each in zip(*[(h, t) for h, _, t in map(tensors, parts)], strict=True)]
    return zloss.head_loss(joined[0][cut], tensors(0)[1], joined[1][cut], OBJECTIVE, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_numbers_are_those_of_all_tokens_of_the_last_steps(reduction: str) -> None:
    window = StepWindow(2, "centered")
    for step in range(3):
        for cut in (slice(0, 10), slice(10, None)):
            window.add(micro_batch(loss([step], reduction, cut), reduction))
        window.end_step(grad_norm=float(step), max_norm=1.5)
    whole = loss([1, 2])
    found = window.scalars()
    for name, value in whole.stats.summary().items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    assert found["ce"] == pytest.approx(float(whole.cross_entropy), rel=1e-12)
    assert found["z"] == pytest.approx(float(whole.auxiliary), rel=1e-12)
    assert found["p_z_999"] == found["p_z_999_centered"] != found["p_z_999_raw"]
    assert found["a_p_99"] == found["gain_centered_p99"]
    assert (found["grad_norm_preclip"], found["grad_norm_preclip_max"], found["clip_rate"]) == (2.0, 2.0, 0.5)
    assert found["window_steps"] == 2
    assert all(type(value) is float for value in found.values())
    assert window.last_step()["ce"] == pytest.approx(float(loss([2]).cross_entropy), rel=1e-12)


def test_raw_is_deployed_by_raw_objectives() -> None:
    window = StepWindow(1)
    window.add(micro_batch(loss([0]), "mean"))
    window.end_step()
    found = window.scalars()
    assert found["p_z_999"] == found["p_z_999_raw"]
    assert found["a_p_99"] == found["gain_p99"]
    assert "grad_norm_preclip" not in found


def test_nothing_yet_and_nothing_valid() -> None:
    window = StepWindow(3)
    assert window.scalars() == {}
    window.end_step()
    assert len(window) == 0
    hidden, weight, target = tensors(0)
    window.add(micro_batch(zloss.head_loss(hidden, weight, target.fill_(-100), OBJECTIVE), "mean"))
    window.end_step(1.0)
    assert window.scalars() == {"tokens": 0.0, "window_steps": 1.0}
    with pytest.raises(InputError, match="window"):
        StepWindow(0)


def test_nothing_is_kept_beyond_the_window() -> None:
    window = StepWindow(4)
    kept = []
    for step in range(12):
        window.add(micro_batch(loss([step]), "mean"))
        window.end_step()
        kept.append(sum(value.numel() for each in window._steps for value in each.totals.values.values()))
    assert kept[3] == kept[-1]
    assert not any(value.requires_grad for each in window._steps for value in each.totals.values.values())


def test_parts_of_the_loss_cover_all_steps_since_a_restart_and_tails_the_last_ones() -> None:
    window = StepWindow(2, "centered", since_restart=True)
    for step in range(5):
        if step == 1:
            window.restart()
            assert window.scalars()["window_steps"] == 1  # readable until the next step ends
        window.add(micro_batch(loss([step]), "mean"))
        window.end_step()
    found = window.scalars()
    assert found["ce"] == pytest.approx(float(loss([1, 2, 3, 4]).cross_entropy), rel=1e-12)
    assert found["z"] == pytest.approx(float(loss([1, 2, 3, 4]).auxiliary), rel=1e-12)
    assert found["log_z_max"] == pytest.approx(loss([3, 4]).stats.summary()["log_z_max"], rel=1e-12)
    assert found["window_steps"] == 2
    assert window.last_step()["ce"] == pytest.approx(float(loss([4]).cross_entropy), rel=1e-12)


def test_every_quantity_has_one_name_per_number() -> None:
    assert list(SCALARS) == [*MEANS, *TAILS]
    assert all(len(SCALARS[name]) == 1 for name in MEANS)
    assert all(len(SCALARS[name]) == 1 + len(LEVELS) for name in TAILS)
    assert len(set(KNOWN)) == len(KNOWN)
    assert set(MAIN) | {name for names in DEPLOYED.values() for name in names.values()} <= set(KNOWN)


def test_alerts_name_scalars_that_exist() -> None:
    of_the_optimizer = {"adam_v_max", "fp16_margin", *(rule.quantity for rule in RULES if rule.kind == "events")}
    assert {rule.quantity for rule in RULES} - of_the_optimizer | {VIOLATION, LOG_Z, GRADIENT_NORM} <= set(KNOWN)


def window_of(seeds: dict[int, int], *, across: bool = False, group: dist.ProcessGroup | None = None) -> StepWindow:
    """A window of one step, with a micro-batch per seed → tokens."""
    window = StepWindow(4, "raw", across_ranks=across, group=group)
    for seed, tokens in seeds.items():
        hidden, weight, target = tensors(seed, tokens)
        window.add(micro_batch(zloss.head_loss(hidden, weight, target, OBJECTIVE)))
    window.end_step(2.0, 1.0)
    return window


class TwoRanks:
    """The collective as two ranks would have it: this one's message, and that of a window on the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: StepWindow, other: list[TokenTotals]) -> None:
        self._window, self._other = window, other
        monkeypatch.setattr("zloss.telemetry.window.world_size", lambda: 2)
        monkeypatch.setattr("zloss.telemetry.window.gathered", self.gather)

    def gather(self, packed: torch.Tensor, _group: object) -> torch.Tensor:
        return torch.stack([packed, torch.cat([_pack(part, self._window._kept) for part in self._other])])


def totals(window: StepWindow) -> TokenTotals:
    (step,) = window._steps
    return step.totals


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
    found = window_of(seeds, across=True).both()
    # A separate group for each rank, as for ranks that hold the same tokens.
    groups = [dist.new_group([rank]) for rank in range(2)]
    found += window_of(seeds, across=True, group=groups[dist.get_rank()]).both()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes_give_the_numbers_of_one() -> None:
    every_token, separate = window_of({1: 300, 2: 170}).both(), window_of({1: 300}).both()
    found = json.loads(forked_ranks(2, print_scalars_of_both))
    for got, wanted in zip(found, every_token + separate, strict=True):
        assert got == pytest.approx(wanted, rel=1e-9)
