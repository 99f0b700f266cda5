"""Validation block by block: means are those of the blocks, tails are the largest values of the whole text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from zloss.decide.intervals import violations
from zloss.errors import InputError
from zloss.measure.measurement import Measurement
from zloss.measure.tokens import DRIFT_TAILS, RUN_TAILS, block_values
from zloss.results.record import from_plain, to_plain
from zloss.results.run_metrics import ValidationBlocks, kept_values
from zloss.text import Blocks

BLOCKS, SIZE, OFFSET = 40, 64, 3
BETA = 1e-2


def recorded(
    values: torch.Tensor, ce: torch.Tensor, order: Any = slice(None), tails: Any = RUN_TAILS
) -> ValidationBlocks:
    """Of tokens whose violation, |μ|, gain and half of ‖δ_u‖ are `values`; rows in any `order`."""
    constants: Any = {"target": 0.0, "coef": 1.0, "gain_beta": BETA, "coordinates": ("raw",)}
    measurement: Measurement = type("Constants", (), constants)()
    x = values.numpy()
    index = np.arange(BLOCKS * SIZE)
    columns = {"block": index // SIZE + OFFSET, "ce": ce.numpy(), "log_z": -x, "mu": -x, "gain": x, "delta_u": 2 * x}
    blocks = Blocks(torch.zeros(BLOCKS * SIZE + 1), SIZE, BLOCKS, None, OFFSET)
    return block_values({name: column[order] for name, column in columns.items()}, measurement, blocks, tails)


def test_blocks_are_those_of_a_straight_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(BLOCKS * SIZE, generator=generator).double() ** 4
    # One block holds most of the large values: a separate threshold would lose them.
    values[7 * SIZE : 8 * SIZE] += 1
    ce = torch.rand(BLOCKS * SIZE, generator=generator)
    blocks = recorded(values, ce)
    assert blocks.tokens == (SIZE,) * BLOCKS
    assert blocks.ce == pytest.approx(ce.view(BLOCKS, SIZE).double().mean(1).tolist())
    assert blocks.means["shift_squared.raw"] == pytest.approx((values**2).view(BLOCKS, SIZE).mean(1).tolist())
    assert blocks.kept == kept_values(BLOCKS * SIZE) == 500
    kept = np.sort(np.concatenate([np.array(block) for block in blocks.tails["violation.raw"]]))
    assert kept == pytest.approx(np.sort(values.numpy())[-500:], rel=1e-6)
    assert len(blocks.tails["violation.raw"][7]) == SIZE
    assert blocks.tails["delta_u.raw"][7][0] == pytest.approx(2 * float(values.max()), rel=1e-6)
    aware = 2 * values.max() / (1 + BETA * values.max() ** 2)
    assert blocks.tails["delta_u_gain_aware.raw"][7][0] == pytest.approx(float(aware), rel=1e-6)
    shuffled = np.random.default_rng(0).permutation(BLOCKS * SIZE)
    assert blocks.tails == recorded(values, ce, shuffled).tails  # the rows of ranks may come in any order
    assert from_plain(ValidationBlocks, to_plain(blocks)) == blocks


def test_drift_keeps_the_gain_instead_of_the_hidden_source() -> None:
    values = torch.rand(BLOCKS * SIZE, generator=torch.Generator().manual_seed(1)).double()
    assert set(recorded(values, values, tails=DRIFT_TAILS).tails) == {"violation.raw", "shift.raw", "gain.raw"}
    assert set(recorded(values, values).tails) == {
        f"{name}.raw" for name in ("violation", "log_z", "minus_log_z", "shift", "delta_u", "delta_u_gain_aware")
    }


@pytest.mark.parametrize("target", [-9.0, 0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("size", [7, 20, SIZE], ids=["every value is kept", "the ends overlap", "the ends are apart"])
@pytest.mark.parametrize("whole", [False, True], ids=["continuous", "ties"])
def test_the_tail_at_any_target_follows_from_both_ends_of_log_z(target: float, size: int, whole: bool) -> None:
    log_z_BT = np.random.default_rng(size).normal(0, 2, (BLOCKS, size))
    log_z_BT = log_z_BT.round() if whole else log_z_BT
    blocks = both_ends(log_z_BT)
    distances = np.sort(np.abs(log_z_BT - target).flatten())
    found = violations(blocks, "raw", target)
    assert found is not None
    kept = np.sort(np.concatenate([np.array(block) for block in found.values]))
    assert kept == pytest.approx(distances[-len(kept) :], abs=1e-5)
    # All values above a common threshold, and enough of them for a p95.
    assert len(kept) >= 0.05 * len(distances)
    for values, row in zip(found.values, np.abs(log_z_BT - target), strict=True):
        assert sum(value > kept[0] + 1e-5 for value in values) == (row > kept[0] + 1e-5).sum()


def test_validation_keeps_both_ends_of_log_z() -> None:
    values = torch.randn(BLOCKS * SIZE, generator=torch.Generator().manual_seed(2)).double()
    kept, log_z = recorded(values, torch.ones(BLOCKS * SIZE)).tails, np.sort(-values.numpy())
    high, low = (
        np.sort(np.concatenate([np.array(b) for b in kept[f"{name}.raw"]])) for name in ("log_z", "minus_log_z")
    )
    assert high == pytest.approx(log_z[-500:], abs=1e-6)
    assert -low[::-1] == pytest.approx(log_z[:500], abs=1e-6)


def both_ends(log_z_BT: np.ndarray[Any, Any]) -> ValidationBlocks:
    """What validation keeps of log Z: the 500 largest values and the 500 smallest."""
    tails = {}
    for name, values_BT in (("log_z.raw", log_z_BT), ("minus_log_z.raw", -log_z_BT)):
        rows = np.argsort(-values_BT.flatten(), kind="stable")[:500]
        chosen = [values_BT.flatten()[rows[rows // values_BT.shape[1] == b]] for b in range(len(values_BT))]
        tails[name] = tuple(tuple(sorted(map(float, values), reverse=True)) for values in chosen)
    count, size = log_z_BT.shape
    return ValidationBlocks((size,) * count, (1.0,) * count, 500, tails)


def test_a_text_without_one_end_has_no_tail_and_an_older_run_no_answer() -> None:
    """Half of a text whose smallest values are all in the other half ended in a traceback."""
    blocks = both_ends(np.random.default_rng(0).normal(0, 2, (BLOCKS, SIZE)))
    one_end = replace(blocks, tails=blocks.tails | {"minus_log_z.raw": ((),) * BLOCKS})
    found = violations(one_end, "raw", 0.0)
    assert found is not None
    assert not any(found.values)
    assert violations(replace(blocks, tails={}), "raw", 0.0) is None


def test_only_log_z_may_be_negative() -> None:
    assert ValidationBlocks((2,), (1.0,), 2, {"log_z.raw": ((-1.0,),)}).tails
    with pytest.raises(
        InputError, match=r"`tails\.violation\.raw` is expected to have no negative value, but has -1\.0"
    ):
        ValidationBlocks((2,), (1.0,), 2, {"violation.raw": ((-1.0,),)})


def test_a_nonfinite_token_leaves_its_block_without_a_mean() -> None:
    values, ce = torch.ones(BLOCKS * SIZE), torch.ones(BLOCKS * SIZE)
    values[5], ce[5] = torch.inf, torch.nan
    blocks = recorded(values, ce)
    assert blocks.ce[0] is None
    assert blocks.ce[1] == 1
    assert all(np.isfinite(block).all() for block in blocks.tails["violation.raw"])
