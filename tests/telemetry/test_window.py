"""Windows over steps: the numbers of all their tokens, bounded, independent of the split to micro-batches."""

from __future__ import annotations

import pytest
import torch

import zloss
from zloss.errors import InputError
from zloss.telemetry.window import StepWindow, micro_batch

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
