"""Validation block by block: means are those of the blocks, tails are the largest values of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zloss.measure.block_values import DRIFT_TAILS, BlockValues
from zloss.measure.token_table import TokensInCoordinate, TokenTable
from zloss.results.record import from_plain, to_plain
from zloss.results.validation_blocks import ValidationBlocks, kept_values

BLOCKS, SIZE = 40, 64


def tokens(values: torch.Tensor) -> TokensInCoordinate:
    return TokensInCoordinate(
        log_z=values, violation=values, gain=values, row_max=values, mu=-values, delta_z=values, delta_u=2 * values,
        delta_u_gain_aware=values / 2, leading=values,
    )  # fmt: skip


def table(values: torch.Tensor, ce: torch.Tensor) -> TokenTable:
    # Statistics and Wᵀp are for gradients; values by block do not read them.
    unread: Any = None
    return TokenTable(slice(0, len(values)), ce, tokens(values), None, unread)


def recorded(values: torch.Tensor, ce: torch.Tensor, chunk: int) -> ValidationBlocks:
    found = BlockValues(BLOCKS, SIZE)
    for start in range(0, len(values), chunk):
        part = slice(start, start + chunk)
        found.update(table(values[part], ce[part]), start)
    return found.record()


def test_blocks_are_those_of_a_straight_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(BLOCKS * SIZE, generator=generator).double() ** 4
    # One block holds most of the large values: a threshold of its own would lose them.
    values[7 * SIZE : 8 * SIZE] += 1
    ce = torch.rand(BLOCKS * SIZE, generator=generator)
    blocks = recorded(values, ce, chunk=37)
    assert blocks.tokens == (SIZE,) * BLOCKS
    assert blocks.ce == pytest.approx(ce.view(BLOCKS, SIZE).double().mean(1).tolist())
    assert blocks.means["shift_squared.raw"] == pytest.approx((values**2).view(BLOCKS, SIZE).mean(1).tolist())
    assert blocks.kept == kept_values(BLOCKS * SIZE) == 500
    kept = np.sort(np.concatenate([np.array(block) for block in blocks.tails["violation.raw"]]))
    assert kept == pytest.approx(np.sort(values.numpy())[-500:], rel=1e-6)
    assert len(blocks.tails["violation.raw"][7]) == SIZE
    assert blocks.tails["delta_u.raw"][7][0] == pytest.approx(2 * float(values.max()), rel=1e-6)
    assert blocks.tails == recorded(values, ce, chunk=1000).tails
    assert from_plain(ValidationBlocks, to_plain(blocks)) == blocks


def test_drift_keeps_the_gain_in_place_of_the_hidden_source() -> None:
    values = torch.rand(BLOCKS * SIZE, generator=torch.Generator().manual_seed(1)).double()
    found = BlockValues(BLOCKS, SIZE, tails=DRIFT_TAILS)
    found.update(table(values, values), 0)
    assert set(found.record().tails) == {"violation.raw", "shift.raw", "gain.raw"}
    assert set(recorded(values, values, chunk=100).tails) == {
        f"{name}.raw" for name in ("violation", "shift", "delta_u", "delta_u_gain_aware")
    }


def test_a_nonfinite_token_leaves_its_block_without_a_mean() -> None:
    values, ce = torch.ones(BLOCKS * SIZE), torch.ones(BLOCKS * SIZE)
    values[5], ce[5] = torch.inf, torch.nan
    blocks = recorded(values, ce, chunk=64)
    assert blocks.ce[0] is None
    assert blocks.ce[1] == 1
    assert all(np.isfinite(block).all() for block in blocks.tails["violation.raw"])
