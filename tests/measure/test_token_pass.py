"""The pass over tokens: batches do not matter, the caller decides between them, a saved pass goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measure.conftest import COUNT, SIZE
from zloss.measure.measurement import Measurement, measurement_of
from zloss.measure.tail_table import HEAD_NUMBERS
from zloss.measure.tails import Tails
from zloss.measure.token_pass import TokenPass
from zloss.models.checkpoint import Checkpoint
from zloss.models.output_head import hidden_states
from zloss.results.audit import HeadNumbers
from zloss.text import Blocks


def taken(checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks, batch: int, **options: Any) -> Tails:
    tails = Tails(measurement)
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        run(TokenPass(measurement, blocks, hidden_of, batch), tails, **options)
    return tails


def run(token_pass: TokenPass, tails: Tails, stop: int = COUNT, finished: int = 0) -> list[int]:
    """The numbers of finished blocks that the caller was told."""
    told: list[int] = []

    def go_on(blocks: int) -> bool:
        told.append(blocks)
        return blocks < stop

    assert token_pass.run(tails, go_on, finished=finished) == told[-1]
    return told


def test_batches_do_not_change_the_numbers(checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks) -> None:
    one, three = (taken(checkpoint, measurement, blocks, batch) for batch in (1, 3))
    assert one.count == three.count == COUNT * SIZE
    for coordinate in ("raw", "centered"):
        got, want = (vars(tails.numbers(coordinate)) for tails in (one, three))
        assert got == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert None not in got.values()


def test_a_stopped_pass_goes_on_from_its_state(
    checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks
) -> None:
    whole = taken(checkpoint, measurement, blocks, 2)
    half = taken(checkpoint, measurement, blocks, 2, stop=4)
    assert half.count == 4 * SIZE
    rest = Tails(measurement)
    rest.restore(half.state())
    with hidden_states(checkpoint, measurement.head) as hidden_of:
        told = run(TokenPass(measurement, blocks, hidden_of, 2), rest, finished=4)
    assert told == [6, 7]
    assert rest.numbers("raw") == whole.numbers("raw")
    assert rest.numbers("centered") == whole.numbers("centered")
    assert rest.histograms() == whole.histograms()
    assert rest.top("raw", "gain") == whole.top("raw", "gain")


def test_bos_positions_are_not_counted(checkpoint: Checkpoint, measurement: Measurement, blocks: Blocks) -> None:
    seen: list[tuple[int, ...]] = []

    def hidden_of(ids_BN: Tensor) -> Tensor:
        seen.append(tuple(ids_BN.shape))
        return torch.zeros(*ids_BN.shape, measurement.head.width, dtype=torch.float64)

    token_pass = TokenPass(measurement, replace(blocks, bos_id=0), hidden_of, 2)
    hidden_TD, target_T = token_pass.states(0, 2)
    assert seen == [(2, SIZE + 1)]
    assert hidden_TD.shape == (2 * SIZE, measurement.head.width)
    assert torch.equal(target_T, blocks.stream[1 : 2 * SIZE + 1])


def test_the_table_declares_every_token_number_once() -> None:
    fields = [number.field for number in HEAD_NUMBERS]
    assert sorted([*fields, "sigma_1", "e_1", "e_16"]) == sorted(vars(HeadNumbers()))
    for number in HEAD_NUMBERS:
        assert (number.quantile is not None) == (number.accumulator.__name__ == "Quantiles")


def test_a_sketched_quantile_has_its_bound(measurement: Measurement, checkpoint: Checkpoint, blocks: Blocks) -> None:
    tails = taken(checkpoint, measurement, blocks, 7)
    assert tails.bounds() == {}
    sketched = tails.state()
    sketched["raw/a_p_99/exact_limit"] = 8
    tails.restore(sketched)
    assert list(tails.bounds()) == ["heads.raw.a_p_99"]
    bound = tails.bounds()["heads.raw.a_p_99"]
    assert bound.lower <= (tails.numbers("raw").a_p_99 or 0) <= bound.upper
    assert bound.count == COUNT * SIZE


def test_a_head_without_mu_has_another_layout(measurement: Measurement) -> None:
    capped = replace(measurement, head=replace(measurement.head, softcap=30.0))
    assert capped.coordinates == ("raw",)
    assert Tails(capped).layout() != Tails(measurement).layout()
    assert Tails(capped).numbers("centered") == HeadNumbers()


def test_rows_outside_the_vocabulary_do_not_hide_the_centered_head(measurement: Measurement) -> None:
    """A -inf bias beyond `valid_vocab` is not inside μ."""
    bias_V = torch.zeros(measurement.head.vocab)
    bias_V[-1] = -torch.inf
    head = replace(measurement.head, bias_V=bias_V)
    assert measurement_of(head, coef=1e-4).lacks_centered is not None
    assert measurement_of(head, head.vocab - 1, coef=1e-4).lacks_centered is None
